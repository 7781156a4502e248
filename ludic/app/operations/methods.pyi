"""Types of the methods of `Run`. Written by `make format` from the operations."""

from ludic.app.operations import ask_again, evaluations, exchange, keep, look, machines, start

class Methods:
    bisect = ask_again.bisect
    check = start.check
    cluster = machines.cluster
    compact = keep.compact
    compare = evaluations.compare
    contamination = evaluations.contamination
    cut = ask_again.cut
    eval = evaluations.eval_
    expire = keep.expire
    export = exchange.export
    import_ = exchange.import_
    label = look.label
    report = look.report
    run = start.run
    sample = look.sample
    scale = machines.scale
    score = evaluations.score
    serve = machines.serve
    sql = look.sql
    train = start.train
    verify = keep.verify
    view = look.view
    watch = look.watch
    what_if = ask_again.what_if
    worker = start.worker
