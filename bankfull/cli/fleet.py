"""`bankfull plan --simulate`: a fleet over a day."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.plan.fleet_options import FleetOptions
    from bankfull.plan.planner import PlanRequest
    from bankfull.plan.sites import Site


def simulate_day(
    request: PlanRequest,
    sites: Sequence[Site],
    options: FleetOptions,
    requests: int,
    routing: str,
    trace: str | None,
    chart: str | None,
    json: bool,
) -> None:
    from bankfull.charts import check_path, save_svg
    from bankfull.cli.terminal import print_table, progress
    from bankfull.limits.model.recipe import open_model_or_config
    from bankfull.plan.fleet_plan import check_day, check_options, configuration_for, policies_of, simulate_fleet
    from bankfull.plan.fleet_report import fleet_charts, fleet_table, stacked_svg

    # Everything that can be refused is checked before the long part.
    check_options(options)
    check_day(requests, trace)
    policies = policies_of(routing)
    if chart is not None:
        check_path(chart)
    subject = open_model_or_config(request.model)
    with progress("simulations of one replica", None) as advance:
        configuration = configuration_for(subject, sites, request, options.replicas, advance)
    with progress("requests", requests * len(policies)) as advance:
        day = simulate_fleet(request, configuration, options, requests, routing, trace, advance)
    if chart is not None:
        charts = fleet_charts(day.outcomes, request.model)
        save_svg(lambda theme: stacked_svg(charts, theme), chart)
    if json:
        print(json_text.dumps(day.as_json()))
        return
    print_table(fleet_table(day.outcomes, day.title))
    for line in day.sentences():
        print(line)
