-- capture_of: what was kept of the sampling of a rollout: sampler, trainer, ids or text, see docs/schemas.md
-- text: also a row that was imported before rollouts 1.8 without logprobs, which its metadata says
-- the views rollouts and evals have this in their column capture
-- NULL: the sampler's ids and logprobs, as sampler
create or replace macro capture_of(capture, metadata) as
coalesce(capture, case when metadata['logprobs'] = 'absent' then 'text' end)
