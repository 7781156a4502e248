-- drop_errors: an environment or a tool failed, or the episode was not scored; always on
error is not null or episode_reward is null
