-- comparable_reward: a reward as it is compared with other rewards: equal sums may differ in their last digit
create or replace macro comparable_reward(reward) as
round(reward, 9)
