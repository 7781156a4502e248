-- uniform: any pending group with the same probability; with max_uses above 1, replay
-- grain: one row per group_id, the first ones make the batch | reads: groups
-- by an MD5 of the group, $seed (of run.json) and $step, so that the same groups give the same batch
select group_id from groups order by md5(concat_ws('/', group_id, $seed, $step)), group_id
