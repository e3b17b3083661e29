"""The thread that owns the engine. Other threads use `submit` and `cancel`. Outputs of a step are passed to the event loop of
their reader, so a slow reader delays nobody.

A step that raises (out of memory, or a bug that one request triggers) loses no request: all are prefilled again, half as many
at a time, until the request that fails alone is found. If the thread itself fails, every request fails with 503, and the
process is told to end (`on_death`), so that its supervisor can restart it.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from foredraft.heads.target_model import Target
from foredraft.inference.drafters import Drafter
from foredraft.inference.engine import Engine, RequestOutput
from foredraft.inference.request import Request
from foredraft.inference.serve.cache_budget import slot_limits
from foredraft.inference.serve.errors import ApiError

log = logging.getLogger("foredraft.serve")


GOOD_STEPS, MAX_GOOD_STEPS = 16, 1024  # successful steps before the batch may grow again, see `BatchLimit`
RETRY_LATER = {"retry-after": "1"}  # seconds
LAST_STEP = 60.0  # seconds that the last step may take
ENGINE_DEAD = "the engine stopped after an error, and this server ends: try again later"


@dataclass(eq=False)
class Job:
    """Hold a request and the queue of its outputs, which all jobs of one client's request share. The last output has a
    finish reason, or is an error."""

    request: Request
    deadline: float  # time.monotonic()
    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[tuple[Job, RequestOutput | ApiError]]"
    engine: Engine
    delivered: int = 0  # number of sent tokens


class BatchLimit:
    """Limit the number of requests that are decoded at a time. A step that raises halves it, and some successful steps double
    it again. After repeated failures, more successful steps are required."""

    def __init__(self, most: int):
        self.max_size = self.size = most
        self.successes, self.required = 0, GOOD_STEPS

    def on_failure(self, tried: int) -> int:
        """Return the limit after a failed step of `tried` requests. A single request was the cause, and is removed."""
        self.size = max(1, tried // 2) if tried > 1 else self.max_size
        self.successes, self.required = 0, min(2 * self.required, MAX_GOOD_STEPS)
        return self.size

    def on_success(self) -> int:
        self.successes += 1
        if self.successes >= self.required:
            if self.size == self.max_size:
                self.required = GOOD_STEPS
            self.size, self.successes = min(2 * self.size, self.max_size), 0
        return self.size


class Worker(threading.Thread):
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        max_num_seqs: int = 16,
        max_waiting: int = 128,
        timeout: float = 600.0,
        cache_gib: float | None = None,
        max_num_batched_tokens: int | None = 512,
        others: Sequence[Drafter] = (),
    ):
        """Initialize the engines. max_num_seqs: maximum number of requests decoded at a time. max_waiting: maximum number of
        waiting requests. timeout: seconds of a request, including its time in the queue. cache_gib: maximum memory of all
        caches, see `slot_limits`; half is for requests without drafts; None is most of what the device has.
        max_num_batched_tokens: `prefill_chunk` of `Engine`. others: more tenants'."""
        super().__init__(name="engine", daemon=True)
        if target.is_collective:
            raise ValueError(
                f"target.sharding={target.sharding}: requests reach one process, but all must take part in every forward: "
                "set target.sharding=layers or engine=vllm"
            )
        self.target, drafters = target, (drafter, *others, None)
        slots = slot_limits(target, drafters, max_num_seqs, cache_gib)
        # One per tenant, and one without drafts for requests that ask for it. Their steps alternate.
        self.engines = [
            Engine(
                target,
                one,
                max_num_seqs=slots.num_slots,
                slot_tokens=slots.entries,
                prefill_chunk=max_num_batched_tokens,
                reuse_prefixes=True,
            )
            for one in drafters
        ]
        self.limits = {engine: BatchLimit(slots.num_slots) for engine in self.engines}
        self.max_open, self.timeout = max_num_seqs + max_waiting, timeout
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.jobs: dict[Request, Job] = {}
        self.open = 0  # number of reserved texts that have not ended
        self.heads: dict[Engine, str] = {}  # names of the heads in use, if they can change (followed_head.py)
        self.lock = threading.Lock()
        self.dead = False
        self.on_death: Callable[[], object] = lambda: None  # called in the thread

    # -- called in the event loop ------------------------------------------------------------------------------------------

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Register `count` texts, all or none, before their prompts are encoded. Within the block, `submit` must follow; an
        exception releases them. Raises ApiError if too many are waiting or the engine has stopped, or ValueError for more
        texts than could ever be accepted."""
        if count > self.max_open:
            raise ValueError(f"{count} texts exceed the limit of {self.max_open} texts at a time: send fewer")
        with self.lock:
            self.check_alive()
            if self.open + count > self.max_open:
                raise ApiError(429, "too many requests are waiting: try again later", headers=RETRY_LATER)
            self.open += count
        try:
            yield
        except BaseException:
            with self.lock:
                self.open -= count
            raise

    def submit(
        self, requests: list[Request], speculative: bool = True, tenant: int = 0, deadline: float | None = None
    ) -> list[Job]:
        """Submit reserved texts, all or none. tenant: number of the engine. deadline: on time.monotonic(); None is `timeout`
        seconds from now. Raises ValueError for requests that could never be decoded, ApiError if the engine has stopped."""
        engine = self.engines[tenant if speculative else -1]
        for request in requests:
            engine.check(request)  # thread-safe, because it changes nothing
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        outputs: asyncio.Queue[tuple[Job, RequestOutput | ApiError]] = asyncio.Queue()
        jobs = [Job(request, deadline, loop, outputs, engine) for request in requests]
        self.put(*(partial(self.add, job) for job in jobs))
        return jobs

    def context(self, speculative: bool = True, tenant: int = 0) -> int | None:
        """Return the maximum length of a text, including its prompt: the target's context, or the capacity of the cache with
        the trees of this tenant's drafter."""
        engine = self.engines[tenant if speculative else -1]
        return min((most for most in (self.target.context, engine.max_text_tokens()) if most is not None), default=None)

    @property
    def timed_out(self) -> ApiError:
        return ApiError(504, f"the request took longer than {self.timeout:g} seconds")

    def cancel(self, job: Job) -> None:
        self.inbox.put(partial(self.end, job))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function in the thread, between steps. The future can be canceled. Raises ApiError."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self.check_alive()
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.put(run)
        return future

    def put(self, *calls: Callable[[], None]) -> None:
        with self.lock:  # calls that are in the inbox before `die` empties it fail there
            self.check_alive()
            for call in calls:
                self.inbox.put(call)

    def check_alive(self) -> None:
        if self.dead:
            raise ApiError(503, ENGINE_DEAD)

    def stop(self) -> None:
        """End the thread after its step, and wait for that: a process that ends while a thread computes is aborted."""
        self.inbox.put(None)
        self.join(LAST_STEP)
        if not self.is_alive():
            for engine in self.engines:
                engine.drafter.save()

    # -- called in the thread ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self.drain_inbox():
                self.expire_jobs()
                for engine in self.engines:
                    if engine.has_work:
                        self.step(engine)
        except BaseException:
            log.critical("the engine's thread failed", exc_info=True)
            self.die()

    def die(self) -> None:
        """End all requests with an error, including those in the inbox, and accept no more."""
        with self.lock:
            self.dead = True
        while not self.inbox.empty():
            if (call := self.inbox.get()) is not None:
                call()  # it fails, or registers a job that fails below
        for job in self.jobs.values():
            self.send(job, ApiError(503, ENGINE_DEAD))
        self.on_death()

    def drain_inbox(self) -> bool:
        """Run the calls in the inbox, and wait for one if the engines are idle. Returns False at the end."""
        while True:
            try:
                call = self.inbox.get(block=not any(engine.has_work for engine in self.engines))
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def add(self, job: Job) -> None:
        self.jobs[job.request] = job
        try:
            if not self.dead:
                job.engine.add(job.request)
        except ValueError as error:
            # The drafter has been replaced by one with larger trees since the check.
            self.end(job, ApiError(400, str(error)))

    def end(self, job: Job, last: RequestOutput | ApiError | None = None) -> None:
        """End a job: free its slot, and send its last output. Repeated calls have no effect."""
        if self.jobs.pop(job.request, None) is None:
            return
        if not self.dead:  # otherwise its memory may be unusable
            job.engine.cancel(job.request)
        with self.lock:
            self.open -= 1
        if last is not None:
            self.send(job, last)

    def send(self, job: Job, output: RequestOutput | ApiError) -> None:
        try:
            job.loop.call_soon_threadsafe(job.outputs.put_nowait, (job, output))
        except RuntimeError:  # the loop is closed, so nobody reads any more
            log.debug("nobody reads the output of a request")

    def expire_jobs(self) -> None:
        now = time.monotonic()
        for job in [job for job in self.jobs.values() if job.deadline < now]:
            self.end(job, self.timed_out)

    def step(self, engine: Engine) -> None:
        try:
            outputs = engine.step()
        except Exception as error:
            self.recover(engine, error)
            return
        for output in outputs:
            self.deliver(self.jobs[output.request], output)
        engine.max_num_seqs = self.limits[engine].on_success()

    def deliver(self, job: Job, output: RequestOutput) -> None:
        job.delivered += len(output.tokens)
        if output.finish_reason == "error":
            status = 500 if job.request.params.grammar is None else 400
            self.end(job, ApiError(status, f"{job.request.failure} for this text"))
        elif output.finish_reason is not None:
            self.end(job, output)
        else:
            self.send(job, output)

    def recover(self, engine: Engine, error: Exception) -> None:
        """Restore the engine after a step that raised: see the top of this file."""
        running = [sequence for sequence in engine.running() if sequence.request in self.jobs]
        joining = list(islice(engine.waiting, engine.num_admissible()))  # allocating their cache may have failed
        tried = running + joining
        log.warning("a step of %d requests failed", len(tried), exc_info=error)
        if not tried:
            raise error
        for sequence in running:  # what the failed step added was not sent, and its traces are lost
            sequence.restart(engine.target, self.jobs[sequence.request].delivered)
        engine.preempt()
        if len(tried) == 1:
            self.end(self.jobs[tried[0].request], ApiError(500, "decoding this request failed; see the server's log"))
        engine.max_num_seqs = self.limits[engine].on_failure(len(tried))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
