"""Serve with the head that a file names, which a user or `foredraft learn` may change at any time."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from foredraft.inference.drafters import Drafter
from foredraft.inference.serve.errors import ApiError
from foredraft.inference.serve.worker import Worker

log = logging.getLogger("foredraft.serve")
POLL = 0.5  # seconds between two looks at the file


class FollowedHead:
    """Draft with another head whenever the file changes. Requests do not notice, and texts do not change."""

    def __init__(self, worker: Worker, tenant: int, file: Path, load: Callable[..., Drafter], model: str = ""):
        """Initialize with the tenant's number. file: contains the name of a directory next to it, of the head that the worker
        has now. load: loads the drafter path=DIRECTORY. model: the tenant's name, for metrics; "" for a single one."""
        self.worker, self.engine, self.file, self.load = worker, worker.engines[tenant], file, load
        self.prefix = f"{model}/" if model else ""
        self.set_name(file.read_text().strip())

    def set_name(self, name: str) -> None:
        self.name = name
        self.worker.heads[self.engine] = self.prefix + name

    async def follow(self) -> None:
        logged = ""  # the last error, which a broken disk repeats at every poll
        while True:
            await asyncio.sleep(POLL)
            try:
                name = self.file.read_text(errors="replace").strip() if self.file.exists() else ""
                if name not in ("", self.name):  # an empty file is still being written
                    await self.serve(name)
                logged = ""
            except OSError as error:  # such as a full disk
                if logged != str(error):
                    log.warning("%s cannot be read or corrected: %s", self.file, error)
                logged = str(error)

    async def serve(self, name: str) -> None:
        """Serve with this head. If it cannot be loaded, correct the file, unless it names another one by now."""
        try:
            directory = self.file.with_name(name)  # ValueError for a path in place of a name
            if not directory.is_dir():  # otherwise it would be an id on the Hub
                raise ValueError(f"{directory} is not a directory")
            load = partial(self.load, path=str(directory))
            # In the worker's thread, because loading may use the device while a step is being captured.
            await asyncio.wrap_future(self.worker.call(lambda: self.engine.swap(load())))
        except ApiError:
            return  # the engine has stopped, so nothing is known about the head
        except Exception as error:
            log.warning("%s cannot serve: %s", name, error.__cause__ or error)  # instantiate wraps what was raised
            if self.file.read_text(errors="replace").strip() == name:
                self.file.write_text(f"{self.name}\n")
        else:
            self.set_name(name)
            log.info("%s serves", name)
