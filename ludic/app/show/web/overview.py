"""The first page of a run: its state, warnings and live curves."""

from ludic.app.show.web.pages import Answer, PageRequest, page


@page("overview", "overview", menu=1)
def overview(request: PageRequest) -> Answer:
    """State of the run."""
    num_rollouts = request.data.ask("select count(*) from rollouts", {}).item()
    return Answer("overview.html.j2", {"num_rollouts": num_rollouts})
