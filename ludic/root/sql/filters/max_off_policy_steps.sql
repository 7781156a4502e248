-- max_off_policy_steps: the rollout's weights are more than $max_off_policy_steps versions older than $trainer_version
$trainer_version - policy_version > $max_off_policy_steps
