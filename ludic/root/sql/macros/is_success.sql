-- is_success: whether an episode succeeds
-- threshold: reward of a success; NULL: the answer is correct, where that is known, else the reward is 1
-- rewards are sums of rounded numbers, so that 1e-9 less is enough: 0.7 + 0.2 + 0.1 is 0.9999999999999999
-- NULL: for a reward that is NULL
create or replace macro is_success(reward, correct, threshold) as
case
    when reward is null then null
    when threshold is null and correct is not null then correct
    else reward >= coalesce(threshold, 1) - 1e-9
end
