-- drop_incomplete_completions: a completion reached max_tokens, so its finish_reason is length; for episodes
-- ended by a limit of the environment or the protocol, see drop_truncated
incomplete_completion
