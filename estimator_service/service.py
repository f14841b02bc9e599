"""The estimator as a service: an asyncio shell that learns, stores and answers by itself.

Three things go on at once, and none of them waits for another:

    exchange    frames in, replies out; on the event loop, at once
    refit       at a cadence, or sooner when many labels have come; on the event loop
    save        after each refit and order; prepared and confirmed on the loop, stored in a thread

So a slow or locked store delays no reply: the replies' `durable_seq` stands still meanwhile, and
senders hold what is above it. A store that cannot be opened is tried again and again; until then
there is no estimator, and every call says so.

*The end of an incarnation.* Once a newer estimator has begun on the store, this one is a tombstone:
it answers nothing, writes nothing and does not come back, or two of them would take the store from
each other for ever.

*A store that was lost* begins at epoch 1, and senders believe nobody older than they have heard of.
So they say what they have heard of, and the service begins again above it: as after a crash, from
the store, and with all that was not stored sent again. It saves first, which a tombstone cannot: a
sender who has heard of a newer estimator proves a loss only where nobody else writes the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, TypedDict, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from estimator_service.clock import Clock, SystemClock
from estimator_service.config import EstimatorConfig, Positive
from estimator_service.estimator import Estimator
from estimator_service.messages import PairKey, Snapshot, encode
from estimator_service.orders import OrderError
from estimator_service.store import FencedError, Store

logger = logging.getLogger(__name__)

MAX_FRAMES = 64
"""In one exchange."""
MAX_EXCHANGE_BYTES = 4 * 2**20
"""In one exchange. With `MAX_FRAMES`, it bounds how long others wait for their replies."""
SOONEST = 0.2
"""Seconds between two refits, however many labels come: replicas ask about once a second."""
IDLE_SECONDS = 60.0
"""Between two refits while nothing comes: an override may have to end."""
FIRST_RETRY, LAST_RETRY = 0.1, 5.0
"""Seconds before a store that failed is tried again; each time twice as long."""


class ServiceConfig(BaseModel):
    """Where the estimator keeps its state, how it learns and how often."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str = "sqlite:///specfleet.db"
    """URL; see `Store.open`. Processes of several machines need a path that all of them share, or
    PostgreSQL."""
    estimator: EstimatorConfig = EstimatorConfig()
    refit_seconds: Positive = 2.0
    """At least so often, while frames come ..."""
    refit_labels: Annotated[int, Field(ge=1)] = 2000
    """... or when so many labels have come."""
    store_timeout: Positive = 5.0
    """Seconds to wait for the store's lock."""


class EstimatorAway(Exception):
    """The estimator did not answer, or it cannot: go on without it, and try again later."""


class ExchangeRefused(ValueError):
    """An exchange that breaks a rule, which the message names. Nothing of it was taken."""


class ServiceStatus(TypedDict):
    """How the service is. Times in seconds."""

    state: str
    """`opening`, `serving`, `fenced` or `stopped`."""
    reason: str
    """Why it is not serving; empty if it is."""
    epoch: int
    """0 while there is none."""
    fenced: bool
    exchanges: int
    frames: int
    refits: int
    refit_failures: int
    saves: int
    save_failures: int
    """In all, failures to open the store included."""
    seconds_behind: float
    """Age of the oldest refit or order that is not stored."""
    uptime: float


Result = TypeVar("Result")


class _Outdated(Exception):
    """Senders have heard of a newer epoch than the store's: it was lost, or is an old copy."""

    def __init__(self, epoch: int, heard: int) -> None:
        super().__init__(f"the store is at epoch {epoch}, and senders have heard of {heard}")
        self.heard = heard


class EstimatorService:
    """One estimator, from opening its store to its end. Every method on one event loop.

    Args:
        config: settings.
        clock: time, for the estimator and the status.
        open_store: by default, the store that `config` names. Called in a thread.
        sleep: waits before the store is tried again.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        clock: Clock | None = None,
        open_store: Callable[[], Store] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._open_store = open_store or (
            lambda: Store.open(config.store, busy_timeout=config.store_timeout)
        )
        self._sleep = sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specfleet-store")
        self._store: Store | None = None
        self._estimator: Estimator | None = None
        self._state, self._reason = "opening", "the store is being opened"
        self._task: asyncio.Task[None] | None = None
        self._keys: set[PairKey] = set()
        self._arrived = False
        self._enough = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._unsaved_since: float | None = None
        self._saving_since: float | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._started = self._clock.monotonic()
        self._exchanges = self._frames = self._refits = self._refit_failures = 0
        self._saves = self._save_failures = 0

    # -- calls ----------------------------------------------------------------------------------

    # `estimator` is for the shell around this one: what it orders is acknowledged after `stored`.

    @property
    def estimator(self) -> Estimator:
        """The one that serves. Raises EstimatorAway: there is none."""
        if self._estimator is None:
            raise EstimatorAway(self._reason)
        return self._estimator

    def exchange(self, key: PairKey, frames: list[bytes]) -> list[bytes]:
        """Take frames, and give an encoded `Reply` to each. A new pair is registered.

        Raises:
            EstimatorAway: there is no estimator now.
            ExchangeRefused: too many frames, too many bytes, or a key that cannot be registered.
        """
        estimator = self.estimator
        _check(frames)
        self._register(estimator, key)
        replies = [encode(estimator.receive(frame)) for frame in frames]
        self._exchanges += 1
        self._frames += len(frames)
        self._arrived = self._arrived or bool(frames)
        if estimator.waiting >= self._config.refit_labels:
            self._enough.set()
        if estimator.heard > estimator.epoch:
            self._unsaved.set()
        return replies

    def snapshot(self) -> Snapshot:
        """Everything that metrics, the API and people want to know. Raises EstimatorAway."""
        return self.estimator.snapshot()

    async def stored(self) -> None:
        """Wait until every order so far is stored, and every label up to the last refit.

        Raises EstimatorAway: they will not be, and a newer incarnation will not know them.
        """
        _ = self.estimator
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._changed()
        await waiter

    def status(self) -> ServiceStatus:
        """How it is, whatever its state."""
        now = self._clock.monotonic()
        behind = [now - at for at in (self._saving_since, self._unsaved_since) if at is not None]
        return ServiceStatus(
            state=self._state,
            reason=self._reason,
            epoch=0 if self._estimator is None else self._estimator.epoch,
            fenced=self._state == "fenced",
            exchanges=self._exchanges,
            frames=self._frames,
            refits=self._refits,
            refit_failures=self._refit_failures,
            saves=self._saves,
            save_failures=self._save_failures,
            seconds_behind=max(behind, default=0.0),
            uptime=now - self._started,
        )

    # -- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin `run` on the running event loop."""
        self._task = asyncio.create_task(self.run())

    async def run(self) -> None:
        """Open the store, learn and save, until cancelled or fenced; nothing else ends it."""
        above = 0
        while True:
            self._estimator = await self._open(above)
            self._state, self._reason = "serving", ""
            logger.info("the estimator serves as epoch %d", self._estimator.epoch)
            refitting = asyncio.create_task(self._keep_refitting())
            try:
                await self._keep_saving()
            except FencedError as error:
                logger.error("%s; this one answers and writes nothing any more", error)
                self._leave("fenced", f"fenced: {error}")
                await self._close()
                return
            except _Outdated as error:
                above = error.heard
                logger.warning("%s; beginning again above it", error)
                self._leave("opening", str(error))
            finally:
                refitting.cancel()

    async def stop(self) -> None:
        """End; first refit and store what is there, if the store lets it within its timeout."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._estimator is not None:
            try:
                self._refit()
                await self._save()
            except Exception as error:
                logger.warning("stopping without storing the last refit: %s", error)
        self._leave("stopped", "the estimator was stopped")
        await self._close()
        self._thread.shutdown(wait=False)

    def _leave(self, state: str, reason: str) -> None:
        """From now on there is no estimator; what waits for it to be stored waits in vain."""
        self._state, self._reason = state, reason
        self._estimator = None
        self._keys.clear()
        self._unsaved.clear()
        self._unsaved_since = None
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(EstimatorAway(reason))
        self._waiting.clear()

    async def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await self._in_thread(store.close)

    # -- opening --------------------------------------------------------------------------------

    async def _open(self, above: int) -> Estimator:
        retries = _retries()
        while True:
            try:
                return await self._in_thread(lambda: self._begin(above))
            except Exception as error:  # whatever is wrong with it may be put right meanwhile
                self._save_failures += 1
                self._reason = f"the store cannot be opened: {error}"
                delay = next(retries)
                logger.warning("%s; trying again in %.1f s", self._reason, delay)
            await self._sleep(delay)

    def _begin(self, above: int) -> Estimator:
        """Runs in the thread, as everything does that touches the store."""
        if self._store is None:
            self._store = self._open_store()
        return Estimator(self._store, self._config.estimator, self._clock, above)

    # -- learning -------------------------------------------------------------------------------

    async def _keep_refitting(self) -> None:
        idle_since = self._clock.monotonic()
        soonest = min(SOONEST, self._config.refit_seconds)
        while True:
            await asyncio.sleep(soonest)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.refit_seconds - soonest):
                    await self._enough.wait()
            now = self._clock.monotonic()
            if self._arrived or now - idle_since >= IDLE_SECONDS:
                idle_since = now
                try:
                    self._refit()
                except Exception:
                    self._refit_failures += 1
                    logger.exception("a refit failed")

    def _refit(self) -> None:
        self._enough.clear()
        self._arrived = False
        self.estimator.refit()
        self._refits += 1
        self._changed()

    # -- storing --------------------------------------------------------------------------------

    def _changed(self) -> None:
        if self._unsaved_since is None:
            self._unsaved_since = self._clock.monotonic()
        self._unsaved.set()

    async def _keep_saving(self) -> None:
        retries = _retries()
        while True:
            await self._unsaved.wait()
            self._unsaved.clear()
            try:
                await self._save()
                retries = _retries()
            except FencedError:
                raise
            except Exception as error:
                self._unsaved.set()
                self._save_failures += 1
                delay = next(retries)
                logger.warning("nothing was stored: %s; trying again in %.1f s", error, delay)
                await self._sleep(delay)
                continue
            estimator = self.estimator
            if estimator.heard > estimator.epoch:
                raise _Outdated(estimator.epoch, estimator.heard)

    async def _save(self) -> None:
        estimator, store = self.estimator, self._store
        assert store is not None  # it comes and goes with the estimator
        checkpoint = estimator.prepare()
        waiting, self._waiting = self._waiting, []
        self._saving_since, self._unsaved_since = self._unsaved_since, None
        keep = self._config.estimator.history
        try:
            await self._in_thread(lambda: store.save(checkpoint, keep_versions=keep))
        except BaseException:
            self._waiting = waiting + self._waiting
            self._unsaved_since = self._saving_since or self._unsaved_since
            raise
        finally:
            self._saving_since = None
        estimator.confirm(checkpoint)
        self._saves += 1
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _register(self, estimator: Estimator, key: PairKey) -> None:
        try:
            if key in self._keys:
                return
            # One that came from another process was not necessarily checked there.
            checked = msgspec.convert(msgspec.to_builtins(key), PairKey)
            estimator.register(checked)
        except (msgspec.ValidationError, OrderError, TypeError) as error:
            raise ExchangeRefused(f"the pair cannot be registered: {error}") from error
        self._keys.add(checked)


def _check(frames: list[bytes]) -> None:
    if not all(isinstance(frame, bytes) for frame in frames):
        raise ExchangeRefused("a frame is bytes")
    if len(frames) > MAX_FRAMES:
        raise ExchangeRefused(f"{len(frames)} frames in one exchange, above {MAX_FRAMES}")
    if (size := sum(map(len, frames))) > MAX_EXCHANGE_BYTES:
        raise ExchangeRefused(f"{size} bytes in one exchange, above {MAX_EXCHANGE_BYTES}")


def _retries() -> Iterator[float]:
    """Seconds to wait before each retry."""
    delay = FIRST_RETRY
    while True:
        yield delay
        delay = min(2.0 * delay, LAST_RETRY)
