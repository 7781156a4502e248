-- epochs: every group once, then every group again, in a different order in each epoch
-- grain: one row per group_id, the first rows make the batch | reads: groups
-- max_uses is the number of epochs; this is the default selection of offline training
-- ordered by an MD5 of the group, $seed (of run.json) and the epoch, so a new group does not reorder the others
select group_id from groups order by num_uses, md5(concat_ws('/', group_id, $seed, num_uses)), group_id
