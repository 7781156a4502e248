"""The event loop of episodes."""

import asyncio
import subprocess
import sys

from ludic.environments import event_loops


def test_episodes_also_run_inside_a_running_event_loop_as_of_a_notebook() -> None:
    seen: list[str] = []

    async def episode() -> None:
        await asyncio.sleep(0)
        seen.append("episode")

    async def notebook() -> None:
        before, task = asyncio.get_running_loop(), asyncio.current_task()
        event_loops.run(episode())
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (before, task)
        await asyncio.sleep(0)
        seen.append("notebook")

    asyncio.run(notebook())
    assert seen == ["episode", "notebook"]


def test_the_event_loop_of_the_thread_stays_set() -> None:
    async def episode() -> None:
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        event_loops.run(episode())
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


WAITS = """
import asyncio, threading
from ludic.environments import event_loops

async def main():
    waiting = [asyncio.ensure_future(asyncio.to_thread(threading.Event().wait)) for _ in range(100)]
    print(await asyncio.to_thread(lambda: "another goes on"))

event_loops.run(main())
print("over")
"""


def test_functions_in_threads_that_never_return_hold_up_neither_others_nor_the_end() -> None:
    ended = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "another goes on\nover\n", "")


def test_what_a_function_in_a_thread_raises_is_raised() -> None:
    raised: list[BaseException] = []

    async def main() -> None:
        try:
            await asyncio.to_thread(int, "one")
        except ValueError as error:
            raised.append(error)

    event_loops.run(main())
    assert "'one'" in str(raised)
