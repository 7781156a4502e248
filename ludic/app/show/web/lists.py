"""Lists of a run: versions, environments, examples, groups and rollouts."""

from ludic.app.show.data import versions as versions_listing
from ludic.app.show.web.pages import Answer, PageRequest, Table, page


@page("versions", "versions", menu=2)
def versions(request: PageRequest) -> Answer:
    """The policy versions that sampled rollouts, by environment."""
    listing = versions_listing("rollouts")
    rows = request.data.rows(listing, "", listing.order).to_dicts()
    table = Table(name="versions", rows=rows, columns=listing.stored)
    return Answer("list.html.j2", {"table": table}, tables=[table])
