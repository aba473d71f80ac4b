from __future__ import annotations

from disk_tiers import Clock

from kvstore.rare_lines import RareLines


def test_lines_are_rare_and_say_what_they_leave_out() -> None:
    clock, said = Clock(), []
    lines = RareLines(clock=clock)

    def log(text: str, *values: object) -> None:
        said.append(text % values)

    for number in range(5):
        lines.say(log, "failed %d", number)
    clock.now = 11
    lines.say(log, "failed %d", 5)
    clock.now = 30
    lines.say(log, "failed %d", 6)
    assert said == ["failed 0", "failed 5 (4 more such lines were held back)", "failed 6"]


def test_a_line_that_does_not_count_what_was_left_out_is_as_rare() -> None:
    clock, said = Clock(), []
    lines = RareLines(60.0, clock)
    for clock.now in (0.0, 59.0, 60.0):
        lines.say(lambda text, *values: said.append((text, values)), "at %g", clock.now, count=False)
    assert said == [("at %g", (0.0,)), ("at %g", (60.0,))]
