from kvstore.connector.blocks.statistics import PrefixCacheRecorder, PrefixCacheStats


def test_local_and_external_hits_are_told_apart():
    recorder = PrefixCacheRecorder()
    recorder.record(100, 40, 32, preempted=False)
    recorder.record(50, 0, 0, preempted=False)
    assert recorder.take() == PrefixCacheStats(
        requests=2, queries=150, hits=40, external_requests=2, external_queries=110, external_hits=32
    )


def test_preempted_requests_are_counted_apart():
    recorder = PrefixCacheRecorder()
    recorder.record(100, 40, 32, preempted=True)
    recorder.record(10, 4, None, preempted=False)
    assert recorder.take() == PrefixCacheStats(
        requests=1,
        queries=10,
        hits=4,
        preempted_requests=1,
        preempted_queries=100,
        preempted_hits=40,
        preempted_external_requests=1,
        preempted_external_queries=60,
        preempted_external_hits=32,
    )


def test_kvstore_is_not_charged_with_what_it_was_not_asked():
    recorder = PrefixCacheRecorder()
    recorder.record(100, 40, None, preempted=False)
    recorder.record(64, 64, 0, preempted=False)  # nothing is left to be asked for
    assert recorder.take() == PrefixCacheStats(requests=2, queries=164, hits=104)


def test_taking_begins_anew():
    recorder = PrefixCacheRecorder()
    recorder.record(100, 40, 8, preempted=False)
    recorder.record_reset()
    assert recorder.take().reset
    assert recorder.take() == PrefixCacheStats()


def test_a_reset_keeps_what_was_counted_before():
    recorder = PrefixCacheRecorder()
    recorder.record(100, 40, None, preempted=False)
    recorder.record_reset()
    recorder.record(20, 0, None, preempted=False)
    assert recorder.take() == PrefixCacheStats(reset=True, requests=2, queries=120, hits=40)
