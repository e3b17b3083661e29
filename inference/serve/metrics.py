"""Metrics for Prometheus at /metrics: counts and times, never a text or a key."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foredraft.inference.serve.openai.completion import Answer
from foredraft.inference.serve.worker import Worker

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)


class Metrics:
    def __init__(self, worker: Worker):
        self.worker = worker
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry, "namespace": "foredraft"}
        self.requests = Counter("requests", "Requests by path and status", ["path", "status"], **shared)
        failed = "Answers that ended with an error, also streamed ones, by status"
        self.failures = Counter("failed_answers", failed, ["status"], **shared)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **shared)
        self.completion_tokens = Counter("completion_tokens", "Tokens of answers", **shared)
        self.forwards = Counter("forwards", "Target forwards after prompts, per sequence, by head", ["head"], **shared)
        emitted = "Tokens of these forwards; their quotient is the acceptance length"
        self.emitted = Counter("emitted_tokens", emitted, ["head"], **shared)
        reached = "Of these forwards, those that accepted a draft at this depth"
        self.reached = Counter("accepted_at_depth", reached, ["head", "depth"], **shared)
        lengths = "Acceptance length of an answer"
        self.lengths = Histogram("acceptance_length", lengths, ["head"], buckets=LENGTHS, **shared)
        self.first = Histogram("first_token_seconds", "Time to the first token", buckets=SECONDS, **shared)
        self.seconds = Histogram("request_seconds", "Time to the end of the answer", buckets=SECONDS, **shared)
        slots = [engine.slots for engine in worker.engines]

        def gauge(name: str, meaning: str, value: Callable[[], float]) -> None:
            Gauge(name, meaning, **shared).set_function(value)

        def hit_rate() -> float:
            return sum(one.hits for one in slots) / max(1, sum(one.looked_up for one in slots))

        gauge("open_requests", "Texts that are decoded or waiting", lambda: worker.open)
        waiting = "Texts that are waiting"
        gauge("waiting_requests", waiting, lambda: sum(len(engine.waiting) for engine in worker.engines))
        gauge("running_requests", "Texts that are decoded", lambda: sum(len(one.unfinished()) for one in slots))
        gauge("prefix_cache_hit_rate", "Share of prompt tokens that were in the cache", hit_rate)

    def observe(self, answer: Answer, seconds: float) -> None:
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.completion_tokens.inc(answer.completion_tokens)
        for job, choice in answer.choices.items():
            head = self.worker.heads.get(job.engine, "")
            self.forwards.labels(head).inc(len(choice.accepted))
            self.emitted.labels(head).inc(choice.emitted)
            for depth in range(1, max(choice.accepted, default=0) + 1):
                self.reached.labels(head, depth).inc(sum(count >= depth for count in choice.accepted))
            if choice.accepted:
                self.lengths.labels(head).observe(choice.emitted / len(choice.accepted))
        self.seconds.observe(seconds)
        if answer.failure is not None:
            self.failures.labels(answer.failure.status_code).inc()
        if answer.first_token is not None:
            self.first.observe(answer.first_token)

    def page(self) -> bytes:
        return generate_latest(self.registry)
