"""Types of the methods of `Run`. Written by `make format` from the operations."""

from ludic.app.operations import (
    counterfactual,
    evaluations,
    exchange,
    gateway,
    inspect_run,
    machines,
    maintain,
    plots,
    start,
)

class Methods:
    assemble = exchange.assemble
    bisect = counterfactual.bisect
    check = start.check
    cluster = machines.cluster
    compact = maintain.compact
    compare = evaluations.compare
    contamination = evaluations.contamination
    cut = counterfactual.cut
    eval = evaluations.eval_
    expire = maintain.expire
    export = exchange.export
    frame = plots.frame
    gateway = gateway.gateway
    import_ = exchange.import_
    label = inspect_run.label
    plot = plots.plot
    push = exchange.push
    report = inspect_run.report
    run = start.run
    sample = inspect_run.sample
    scale = machines.scale
    score = evaluations.score
    serve = machines.serve
    sql = inspect_run.sql
    train = start.train
    verify = maintain.verify
    view = inspect_run.view
    watch = inspect_run.watch
    what_if = counterfactual.what_if
    worker = start.worker
