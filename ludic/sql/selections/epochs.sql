-- epochs: every group once, then every group again, each time in another order
-- grain: one row per group_id, the first ones make the batch | reads: groups
-- max_uses is the number of epochs; what offline training takes unless told otherwise
-- by an MD5 of the group, $seed (of run.json) and the epoch: a group that comes or goes changes the order of no other
select group_id from groups order by num_uses, md5(concat_ws('/', group_id, $seed, num_uses)), group_id
