"""The event loop of episodes."""

import asyncio

from ludic.agents import event_loop


def test_episodes_also_run_inside_a_running_event_loop_as_of_a_notebook() -> None:
    seen: list[str] = []

    async def episode() -> None:
        await asyncio.sleep(0)
        seen.append("episode")

    async def notebook() -> None:
        before, task = asyncio.get_running_loop(), asyncio.current_task()
        event_loop.run(episode())
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
        event_loop.run(episode())
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()
