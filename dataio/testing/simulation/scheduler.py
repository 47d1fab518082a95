"""The scheduler of the simulation: virtual time, and tasks that run one at a time in one thread.

Purpose: code that sleeps, or waits for a store or other processes, runs unchanged, and takes no more real time than its
own CPU time. The order of events at the same virtual time depends only on a seed, so a seed repeats its history.

Tasks are greenlets: a switch between them costs about a microsecond, and one process can have sixteen thousand of them.

Invariants:

* A task runs until it sleeps or waits, so code between two requests is never interrupted.
* `now` never decreases. With `charge_cpu`, the CPU time of a task counts as virtual time. A seed then does not repeat
  its history.
* A killed process has no further effect: each of its tasks gets `Killed` where it waits, and again at every later wait.
  So its clean-up code cannot write.

Failure behaviour: `run` raises `StuckError` if tasks wait that can never be woken, or if virtual time exceeds `limit`
seconds. So an endless wait raises an error and does not hang the test. `Task.error` holds the exception of a task. If a
task waits for a real lock that another waiting task holds, the whole program hangs.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import greenlet

from headrace.dataio.core.clock import Clock

EPOCH = 1_700_000_000.0
"""The virtual wall clock at the start, in Unix seconds."""


class Killed(BaseException):
    """Ends the tasks of a killed process."""


class StuckError(AssertionError):
    """Some tasks wait and can never be woken, or virtual time has reached its limit."""


@dataclass(eq=False)
class Process:
    """A simulated process: a group of tasks that are killed together.

    `cpu` is the CPU time of its tasks so far, in seconds. `requests` is the number of its requests to stores so far. No
    task of it runs before the virtual time `paused_until`.
    """

    name: str
    alive: bool = True
    paused_until: float = 0.0
    cpu: float = 0.0
    requests: int = 0


@dataclass(eq=False)
class Task:
    """One thread of a simulated process. `result` or `error` is set before `ended` is.

    `wait` is the number of the current wait. A wake-up for an earlier wait is ignored. `woken` tells whether `wake`
    ended the wait, and not the time-out.
    """

    process: Process
    name: str
    ended: Signal
    greenlet: greenlet.greenlet | None = None
    result: object = None
    error: BaseException | None = None
    wait: int = 0
    woken: bool = False

    @property
    def done(self) -> bool:
        return self.ended.is_set


_Event = tuple[float, float, int, Task | Callable[[], object], int]


class Simulation:
    """Runs tasks in virtual time.

    Args:
        seed (int): The seed for the order of simultaneous events and for all other random choices. Default: 0.
        measure_cpu (bool): Whether to measure `Process.cpu`, which costs a system call for each wait. Default: False.
        charge_cpu (bool): Whether CPU time passes as virtual time; implies `measure_cpu`. Default: False.
        limit (float): The maximum virtual time, in seconds. Default: one week.

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

    def __init__(
        self, seed: int = 0, *, measure_cpu: bool = False, charge_cpu: bool = False, limit: float = 7 * 86400.0
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.clock: Clock = _VirtualClock(self)
        self.tasks: list[Task] = []
        self.task: Task | None = None
        """The current task; None outside of all tasks."""
        self._measure, self._charge, self._limit = measure_cpu or charge_cpu, charge_cpu, limit
        self._heap: list[_Event] = []
        self._count = 0
        self._since = 0.0
        self._hub: greenlet.greenlet | None = None
        self._outside = Process("outside of the simulation")

    # callable inside and outside of tasks

    @property
    def process(self) -> Process:
        """The process of the current task. Code outside of all tasks has a separate process."""
        return self.task.process if self.task is not None else self._outside

    def start(
        self,
        work: Callable[..., object],
        *args: object,
        process: Process | None = None,
        name: str = "",
        at: float = 0.0,
    ) -> Task:
        """Start a task `at` seconds from now, in `process` (default: the caller's process)."""
        task = Task(process or self.process, name or getattr(work, "__name__", "task"), Signal(self))
        task.greenlet = greenlet.greenlet(lambda: self._run_task(task, work, args))
        self.tasks.append(task)
        self._push(self.now + at, task)
        return task

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Call `act` after `seconds`. `act` must not wait."""
        self._push(self.now + seconds, act)

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does. A task that kills its own process ends at its next wait."""
        process.alive = False
        for task in self.tasks:
            if task.process is process and not task.done:
                self._push(self.now, task)

    def pause(self, process: Process, seconds: float) -> None:
        """Stop a process for `seconds`, as SIGSTOP and SIGCONT do. Requests that it has sent are still applied."""
        process.paused_until = self.now + seconds

    def wake(self, task: Task) -> None:
        """Wake a task that waits in `park`."""
        if not task.woken and not task.done:
            task.woken = True
            self._push(self.now, task)

    # callable inside tasks

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass for the current task. Outside of all tasks, time does not pass."""
        if self.task is not None:
            self._push(self.now + self._charge_cpu_time() + max(seconds, 0.0), self.task)
            self._switch(self.task)

    def park(self, timeout: float | None = None) -> bool:
        """Wait until `wake` is called for the current task. Returns False if `timeout` seconds pass first."""
        task = self.task
        if task is None:
            raise RuntimeError("only a task of the simulation can wait")
        self._charge_cpu_time()
        task.woken = False
        if timeout is not None:
            self._push(self.now + max(timeout, 0.0), task)
        self._switch(task)
        return task.woken

    # callable outside of tasks

    def run(self) -> None:
        """Run until all tasks have ended. Tasks may be started before and during the run.

        While CPU time is measured, the garbage collector is off. A collection visits the objects of all processes, and
        its CPU time would count for one of them.
        """
        self._hub = greenlet.getcurrent()
        collects = self._measure and gc.isenabled()
        try:
            if collects:
                gc.disable()
            self._loop()
            waiting_names = sorted({task.name for task in self.tasks if not task.done})
            if waiting_names:
                raise StuckError(f"nothing wakes {', '.join(waiting_names[:8])} at {self.now:.3f} s")
        finally:
            if collects:
                gc.enable()
            self._abandon()

    # the event loop

    def _loop(self) -> None:
        while self._heap:
            at, _, _, action, wait = heapq.heappop(self._heap)
            if not isinstance(action, Task):
                self.now = max(self.now, at)
                action()
            elif not action.done and action.wait == wait:
                if at > self._limit:
                    raise StuckError(f"{action.name} still waits after {self._limit:g} s of virtual time")
                self.now = max(self.now, at)
                if action.process.alive and action.process.paused_until > self.now:
                    self._push(action.process.paused_until, action)
                else:
                    self._resume(action)

    def _resume(self, task: Task) -> None:
        assert task.greenlet is not None
        task.greenlet.parent = self._hub  # control returns here at its end, not to the task that started it
        task.wait += 1
        self.task = task
        if self._measure:
            self._since = time.thread_time()
        try:
            task.greenlet.switch()
        finally:
            self.task = None

    def _switch(self, task: Task) -> None:
        """Return control to the scheduler. Returns when the task is resumed; raises `Killed` if its process is dead."""
        assert self._hub is not None
        if task.process.alive:
            self._hub.switch()
        if not task.process.alive:
            raise Killed

    def _run_task(self, task: Task, work: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            if task.process.alive:
                task.result = work(*args)
        except Killed:
            pass
        except BaseException as error:
            task.error = error
        self._charge_cpu_time()
        task.ended.set()

    def _charge_cpu_time(self) -> float:
        """Add the CPU time since the current task's last wait. Returns how much of it counts as virtual time."""
        if not self._measure:
            return 0.0
        now = time.thread_time()
        spent, self._since = now - self._since, now
        self.process.cpu += spent
        return spent if self._charge else 0.0

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Charge the CPU time of the block to no process. Use it for the simulation's own work, such as delivering messages."""
        elapsed = time.thread_time() - self._since
        try:
            yield
        finally:
            self._since = time.thread_time() - elapsed

    def _push(self, at: float, action: Task | Callable[[], object]) -> None:
        self._count += 1
        wait = action.wait if isinstance(action, Task) else 0
        heapq.heappush(self._heap, (at, self.random.random(), self._count, action, wait))

    def _abandon(self) -> None:
        """End the tasks that are left, and keep only those with an error."""
        self._heap.clear()
        for task in self.tasks:
            task.process.alive = task.done and task.process.alive
        for task in self.tasks:
            if not task.done:
                self._resume(task)
        self.tasks = [task for task in self.tasks if task.error is not None]
        self._heap.clear()


class Signal:
    """An event that is set once and never cleared. Tasks wait for it."""

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
        """Wait until it is set, at most `timeout` seconds. Returns whether it is set."""
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
