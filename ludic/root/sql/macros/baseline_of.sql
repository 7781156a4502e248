-- baseline_of: what each of several rewards is compared with: an aggregate for group by, not for over,
-- {n, lowest, total, std}; the view rewards_of_peers has them of trajectories that share a baseline
-- n: number of rewards that are not NULL; the others do not count
-- total, std: of the rewards relative to the lowest, so that equal rewards give exactly 0, and large rewards lose no digits;
-- reward - lowest - total / n is the reward minus the mean
-- std: of the sample (n - 1), and 0 for one reward
-- NULL: lowest and total, if n is 0
-- sorted, so that sums are bit-identical for any number of threads
create or replace macro baseline_of(reward) as {
    n: count(reward),
    lowest: min(reward),
    total: list_sum([each - min(reward) for each in list(reward order by reward)]),
    std: coalesce(list_stddev_samp([each - min(reward) for each in list(reward order by reward)]), 0)
}
