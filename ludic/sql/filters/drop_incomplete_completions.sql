-- drop_incomplete_completions: a completion hit max_tokens, so that its finish_reason is length; for episodes
-- that a limit of the environment or the protocol ended see drop_truncated
incomplete_completion
