-- max_off_policy_steps: sampled by weights more than $max_off_policy_steps versions before $trainer_version
$trainer_version - policy_version > $max_off_policy_steps
