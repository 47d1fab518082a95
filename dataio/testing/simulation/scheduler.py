"""Virtual time: real threads, of which one runs at a time, and a heap of wake-ups.

Purpose: code that sleeps, waits for a store or for other processes runs unchanged, in no more real time than its own
CPU takes. The order of events that fall on the same moment is drawn from a seed, so one seed repeats one history.

Invariants:

* At most one task runs. It runs until it sleeps or waits, so code between two requests is never interrupted.
* `now` never goes back. With `charge_cpu` the CPU time of a task passes for it as virtual time; histories are then not
  repeatable by their seed.
* A process that is killed has no further effect: each of its tasks gets `Killed` where it waits, and again at every
  later wait, so its clean-up code cannot write.

Failure behaviour: `run` raises `StuckError` if tasks are left that nothing can wake, or if `limit` seconds of virtual
time are over: a wait without end is found, not waited for. An exception that leaves a task is kept in `Task.error`.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.dataio.core.clock import Clock

EPOCH = 1_700_000_000.0
"""The virtual wall clock at the start, in Unix seconds."""
_REAL_SECONDS = 600.0
"""The most real seconds that a task may run between two waits. A task that blocks outside of the simulation never ends."""


class Killed(BaseException):
    """Ends the tasks of a killed process."""


class StuckError(AssertionError):
    """Tasks are left that nothing wakes, or virtual time has reached its limit."""


@dataclass(eq=False)
class Process:
    """What is killed together. `cpu`: seconds of CPU of its tasks so far. `requests`: requests to stores so far."""

    name: str
    alive: bool = True
    cpu: float = 0.0
    requests: int = 0


@dataclass(eq=False)
class Task:
    """One thread of a process. `result` and `error` are set when `done` is."""

    process: Process
    name: str
    turn: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False
    result: object = None
    error: BaseException | None = None
    ended: Signal | None = None
    parked: int = 0
    """Number of the current wait. A wake-up for an earlier wait is ignored."""
    woken: bool = False
    since: float = 0.0
    """CPU time of the thread at the end of its last wait."""


_Event = tuple[float, float, int, Task | Callable[[], object], int]


class Simulation:
    """Runs tasks in virtual time.

    Args:
        seed (int): Draws the order of simultaneous events and everything else that is random. Default: 0.
        charge_cpu (bool): Whether CPU time passes as virtual time. Default: False.
        limit (float): The most virtual seconds. Default: one week.

    Example:
        >>> simulation = Simulation(seed=1)
        >>> order = []
        >>> def work(name, seconds):
        ...     simulation.sleep(seconds)
        ...     order.append((name, simulation.now))
        >>> _ = simulation.start(work, "slow", 30.0)
        >>> _ = simulation.start(work, "fast", 10.0)
        >>> simulation.run()
        >>> order
        [('fast', 10.0), ('slow', 30.0)]
    """

    def __init__(self, seed: int = 0, *, charge_cpu: bool = False, limit: float = 7 * 86400.0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.clock: Clock = _VirtualClock(self)
        self.tasks: list[Task] = []
        self._charge, self._limit = charge_cpu, limit
        self._heap: list[_Event] = []
        self._count = 0
        self._local = threading.local()
        self._main = threading.Lock()
        self._main.acquire()
        self._outside = Process("outside of the simulation")
        self._over: BaseException | None = None

    # from anywhere

    @property
    def process(self) -> Process:
        """The process of the current task; a process of its own for code outside of all tasks."""
        task = getattr(self._local, "task", None)
        return task.process if task is not None else self._outside

    def start(
        self,
        work: Callable[..., object],
        *args: object,
        process: Process | None = None,
        name: str = "",
        at: float = 0.0,
    ) -> Task:
        """Start a task `at` this many seconds from now, in `process` or else in the caller's one."""
        task = Task(process or self.process, name or getattr(work, "__name__", "task"))
        task.turn.acquire()
        task.ended = Signal(self)
        self.tasks.append(task)
        threading.Thread(target=self._body, args=(task, work, args), name=f"simulated-{task.name}", daemon=True).start()
        self._push(self.now + at, task, task.parked)
        return task

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Call `act`, which must not wait, after this many seconds."""
        self._push(self.now + seconds, act, 0)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does. A task that kills its own process ends at its next wait."""
        process.alive = False
        for task in self.tasks:
            if task.process is process and not task.done:
                self._push(self.now, task, task.parked)

    # in a task

    def sleep(self, seconds: float) -> None:
        """Let this many seconds pass for the current task. Outside of all tasks, time does not pass."""
        task = getattr(self._local, "task", None)
        if task is None:
            return
        spent = self._spent(task)
        self._push(self.now + spent + max(seconds, 0.0), task, task.parked)
        self._park(task)

    def park(self, timeout: float | None) -> bool:
        """Wait until `wake` is called on the current task; False when `timeout` seconds are over first."""
        task: Task | None = getattr(self._local, "task", None)
        if task is None:
            raise RuntimeError("only a task of the simulation can wait")
        self._spent(task)
        task.woken = False
        if timeout is not None:
            self._push(self.now + max(timeout, 0.0), task, task.parked)
        self._park(task)
        return task.woken

    @property
    def task(self) -> Task | None:
        """The current task; None outside of all tasks."""
        return getattr(self._local, "task", None)

    def wake(self, task: Task) -> None:
        """Wake a task that waits in `park`."""
        if not task.woken:
            task.woken = True
            self._push(self.now, task, task.parked)

    # from outside

    def run(self) -> None:
        """Run until all tasks have ended. Tasks may be started before and meanwhile."""
        self._next(None)
        if not self._main.acquire(timeout=_REAL_SECONDS):
            raise StuckError("a task blocks outside of the simulation")
        over, self._over = self._over, None
        left = [task for task in self.tasks if not task.done]
        if over is None and left:
            over = StuckError(
                f"nothing wakes {', '.join(sorted({task.name for task in left})[:8])} at {self.now:.3f} s"
            )
        self._abandon(left)
        self.tasks = [task for task in self.tasks if task.error is not None]
        if over is not None:
            raise over

    # inside

    def _body(self, task: Task, work: Callable[..., object], args: tuple[object, ...]) -> None:
        task.turn.acquire()
        self._local.task = task
        task.parked += 1
        task.since = time.thread_time()
        try:
            if task.process.alive:
                task.result = work(*args)
        except Killed:
            pass
        except BaseException as error:
            task.error = error
        self._spent(task)
        task.done = True
        assert task.ended is not None
        task.ended.set()
        self._next(None)

    def _spent(self, task: Task) -> float:
        """Account the task's CPU time since its last wait; returns how much of it passes as virtual time."""
        now = time.thread_time()
        spent, task.since = now - task.since, now
        task.process.cpu += spent
        return spent if self._charge else 0.0

    def _push(self, at: float, what: Task | Callable[[], object], wait: int) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self.random.random(), self._count, what, wait))

    def _park(self, task: Task) -> None:
        if not task.process.alive:
            raise Killed
        if not self._next(task):
            task.turn.acquire()
        task.parked += 1
        task.since = time.thread_time()
        if not task.process.alive:
            raise Killed

    def _next(self, current: Task | None) -> bool:
        """Hand over to the next task, or to `run` if there is none. True: the next task is `current`, which goes on."""
        while self._heap and self._over is None:
            at, _, _, what, wait = heapq.heappop(self._heap)
            if not isinstance(what, Task):
                self.now = max(self.now, at)
                what()
                continue
            if what.done or what.parked != wait:
                continue
            if at > self._limit:
                self._over = StuckError(f"{what.name} still waits after {self._limit:g} s of virtual time")
                break
            self.now = max(self.now, at)
            if what is current:
                return True
            what.turn.release()
            return False
        self._main.release()
        return False

    def _abandon(self, left: list[Task]) -> None:
        """End the threads of tasks that nothing wakes any more."""
        for task in left:
            task.process.alive = False
        for task in left:
            if not task.done:
                self._over = None
                self._heap = []
                task.turn.release()
                self._main.acquire(timeout=_REAL_SECONDS)


class Signal:
    """Tasks wait for it until it is set, once and for all."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[Task] = []
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._simulation.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; whether it is set."""
        if not self.is_set:
            task = self._simulation.task
            assert task is not None
            self._waiting.append(task)
            self._simulation.park(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self.is_set


class _VirtualClock:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def monotonic(self) -> float:
        return self._simulation.now

    def time(self) -> float:
        return EPOCH + self._simulation.now

    def sleep(self, seconds: float) -> None:
        self._simulation.sleep(seconds)
