-- uniform: every pending group with the same probability; with max_uses above 1, a replay buffer
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- ordered by an MD5 of the group, $seed (of run.json) and $step, so the same groups give the same batch
select group_id from groups order by md5(concat_ws('/', group_id, $seed, $step)), group_id
