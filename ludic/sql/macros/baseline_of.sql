-- baseline_of: an aggregate of rewards: what each of them is compared with, as {n, lowest, total, mean, std, rewards}
-- rewards: those that are not NULL, sorted, so that sums are bit-identical for any number of threads; n: how many
-- total, mean, std: of the rewards relative to the lowest, so that equal rewards give exactly 0, and large rewards lose no
-- digits; a reward is `reward - lowest - mean` above the mean
-- std: of the sample (n - 1), and 0 for one reward
-- NULL: lowest, total, mean and rewards if n is 0
-- baseline_of_sorted: the same of a list, which is sorted and has no NULL
create or replace macro baseline_of_sorted(rewards) as {
    n: coalesce(len(rewards), 0),
    lowest: rewards[1],
    total: list_sum([reward - rewards[1] for reward in rewards]),
    mean: list_avg([reward - rewards[1] for reward in rewards]),
    std: coalesce(list_stddev_samp([reward - rewards[1] for reward in rewards]), 0),
    rewards: rewards
};

create or replace macro baseline_of(reward) as
baseline_of_sorted(list(reward order by reward) filter (reward is not null))
