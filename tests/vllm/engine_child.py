"""What runs in the process of :class:`tests.vllm.engine.EngineProcess`: vLLM's engine, driven by lines of JSON.

The first line on standard input are the engine's arguments; each further one is a command, ``{"do": name, ...}``. Each
is answered by one line: ``{"ok": result}`` or ``{"error": text}``. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO


def main() -> None:
    # vLLM and its libraries print to standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable(2)  # an engine that does not end is ended by SIGABRT, and says where all of its threads are
    _serve(answers)


def _serve(answers: TextIO) -> None:
    driver: _Driver | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if driver is None:
                driver = _Driver(command)
                result: Any = {"pid": os.getpid()}
            else:
                result = getattr(driver, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 - the test is told, whatever it is
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            if driver is None:
                return
        else:
            answers.write(json.dumps({"ok": result}) + "\n")
    if driver is not None:
        driver.close()


class _Driver:
    """An engine, and what can be asked of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if (transfer := arguments.get("kv_transfer_config")) is not None:
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        if (pooler := arguments.get("pooler_config")) is not None:
            from vllm.config import PoolerConfig

            arguments["pooler_config"] = PoolerConfig(**pooler)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.count = 0

    def generate(
        self,
        requests: list[dict[str, Any]],
        concurrency: int,
        abort_after: int | None = None,
        reset_after: int | None = None,
        kill_at_load: int | None = None,
    ) -> dict[str, Any]:
        """Answer requests, so many at a time, each to its last token, and greedily where it does not say otherwise.

        Args:
            requests: ``prompt``, ``max_tokens``, and what else :class:`tests.vllm.engine.Prompt` has.
            concurrency: most requests at once.
            abort_after: abort all that is under way after so many steps.
            reset_after: reset the prefix cache after so many steps, of requests that run and of the connector, too.
            kill_at_load: SIGKILL for this process when an asynchronous load is planned, before a worker hears of it.
        """
        before = self.counters()
        planned = nullcontext(list[str]()) if kill_at_load is None else self._killing(kill_at_load)
        with planned as killed:
            answers = self._answers(requests, concurrency, abort_after, reset_after)
        after = self.counters()
        return {
            "answers": answers,
            "counters": {name: value - before.get(name, 0.0) for name, value in after.items()},
            "killed": bool(killed),
        }

    @contextmanager
    def _killing(self, pid: int) -> Iterator[list[str]]:
        """Kill a process between the plan of a step and its execution, once: of the first one in which a request begins
        to wait for pages. Yields the requests that do, when it is done."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule
        waiting: list[str] = []

        def then_kill(*arguments: Any, **named: Any) -> Any:
            step = schedule(*arguments, **named)
            if not waiting:
                waiting.extend(n for n, r in scheduler.requests.items() if r.status.name == "WAITING_FOR_REMOTE_KVS")
                if waiting:
                    os.kill(pid, signal.SIGKILL)
            return step

        scheduler.schedule = then_kill
        try:
            yield waiting
        finally:
            del scheduler.schedule

    def _answers(
        self, requests: list[dict[str, Any]], concurrency: int, abort_after: int | None, reset_after: int | None
    ) -> list[dict[str, Any]]:
        waiting = list(enumerate(requests))
        under_way: dict[str, int] = {}
        started: dict[int, float] = {}
        answers: dict[int, dict[str, Any]] = {}
        steps = 0
        while waiting or under_way:
            while waiting and len(under_way) < concurrency:
                index, request = waiting.pop(0)
                self.count += 1
                request_id = f"request-{self.count}"
                under_way[request_id] = index
                answers[index] = {"tokens": [], "cached": 0, "first_token": None, "finish": "aborted"}
                started[index] = time.perf_counter()
                self._add(request_id, request)
            outputs = self.engine.step()
            if not outputs:
                time.sleep(0.001)  # as vLLM's own process does behind a step in which nothing was computed
            for output in outputs:
                index = under_way[output.request_id]
                answer = answers[index]
                if answer["first_token"] is None and output.outputs[0].token_ids:
                    answer["first_token"] = time.perf_counter() - started[index]
                if output.finished:
                    del under_way[output.request_id]
                    answer["tokens"] = list(output.outputs[0].token_ids)
                    answer["choices"] = [list(choice.token_ids) for choice in output.outputs]
                    answer["cached"] = output.num_cached_tokens or 0
                    answer["finish"] = output.outputs[0].finish_reason
                    answer["params"] = output.kv_transfer_params
                    answer["prompt_logprobs"] = _prompt_logprobs(output)
            steps += 1
            if abort_after is not None and steps >= abort_after:
                self.engine.abort_request(list(under_way))
                under_way, waiting = {}, []
            if steps == reset_after:
                self.engine.reset_prefix_cache(True, True)
        return [answers[index] for index in sorted(answers)]

    def embed(self, tokens: list[int]) -> list[float]:
        """What a pooling model makes of a prompt."""
        from vllm import PoolingParams
        from vllm.inputs import TokensPrompt

        self.count += 1
        self.engine.add_request(
            f"request-{self.count}", TokensPrompt(prompt_token_ids=tokens), PoolingParams(task="embed")
        )
        while True:
            for output in self.engine.step():
                if output.finished:
                    values: list[float] = output.outputs.data.tolist()
                    return values
            time.sleep(0.001)

    def _add(self, request_id: str, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True} | (request.get("sampling") or {})
        if fields.get("n", 1) > 1:
            fields["output_kind"] = RequestOutputKind.FINAL_ONLY  # else each answer comes alone
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        if "logit_bias" in fields:  # JSON has no numbers for names
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        extra = {"kv_transfer_params": request["params"]} if request.get("params") is not None else None
        sampling = SamplingParams(
            max_tokens=request["max_tokens"],
            detokenize=False,
            prompt_logprobs=request.get("prompt_logprobs"),
            extra_args=extra,
            **fields,
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt"])
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        if request.get("picture") is not None:
            prompt["multi_modal_data"] = {"image": _picture(request["picture"])}
        lora = LoRARequest("adapter", 1, request["lora"]) if request.get("lora") else None
        self.engine.add_request(request_id, prompt, sampling, lora_request=lora)

    def counters(self) -> dict[str, float]:
        """vLLM's own counters, summed over labels, and with the labels where there are some of interest."""
        found: dict[str, float] = {}
        for metric in self.engine.get_metrics():
            value = getattr(metric, "value", None)
            if not isinstance(value, int | float):
                continue
            labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
            found[metric.name] = found.get(metric.name, 0.0) + value
            if labels:
                name = metric.name + json.dumps(labels, sort_keys=True)
                found[name] = found.get(name, 0.0) + value
        return found

    def drain(self, seconds: float) -> bool:
        """Step until nothing waits for its stores any more. Only for an engine in this process."""
        core = self.engine.engine_core.engine_core
        end = time.monotonic() + seconds
        while core.scheduler.has_requests():
            if time.monotonic() > end:
                return False
            self.engine.step()
            time.sleep(0.001)
        return True

    def reset_prefix_cache(self, seconds: float, connector: bool = False) -> bool:
        """Forget the engine's own cached blocks; with ``connector`` tell the connector to do the same. vLLM refuses
        while blocks are in use, as they are while they are stored.
        """
        end = time.monotonic() + seconds
        while not self.engine.reset_prefix_cache(False, connector):
            if time.monotonic() > end:
                return False
            if hasattr(self.engine.engine_core, "engine_core"):
                self.engine.step()
                time.sleep(0.005)
            else:
                time.sleep(0.05)  # a worker that is asked all the time has none left for its stores
        return True

    def state(self) -> dict[str, Any]:
        """What a leak would show in. Only for an engine in this process."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(scheduler.requests),
            "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "referenced": sum(block.ref_cnt > 0 for block in pool.blocks[1:]),
            "groups": len(scheduler.kv_cache_config.kv_cache_groups),
            "num_blocks": pool.num_gpu_blocks,
            "hash": scheduler.vllm_config.cache_config.prefix_caching_hash_algo,
            "policy": scheduler.vllm_config.kv_transfer_config
            and scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy,
            "recompute": getattr(scheduler, "recompute_kv_load_failures", None),
        }

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    def wake_up(self) -> None:
        self.engine.wake_up()

    def modules(self) -> list[str]:
        """Names of what this process has imported."""
        return sorted(sys.modules)

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def _picture(number: int) -> Any:
    """A noisy one, another for each number."""
    from PIL import Image

    side = 112
    return Image.frombytes("RGB", (side, side), random.Random(number).randbytes(3 * side * side))


def _prompt_logprobs(output: Any) -> list[list[float]] | None:
    if output.prompt_logprobs is None:
        return None
    return [
        [] if position is None else [round(entry.logprob, 4) for entry in position.values()]
        for position in output.prompt_logprobs
    ]


if __name__ == "__main__":
    main()
