"""Rewards: everything that scores a response.

reward.py            ``Reward``: the parts of a response's score, and their sum
rules.py             rules about the text: think / answer format, repetition, length; accuracy for evaluation
reward_models.py     reward models: loading, scores, weights, the clip to ±3, which the critic starts from
get_score_models.py  reward models with code of their own: get_score, in batches where it has get_scores
reward_function.py   the user's own Python function (--reward_fn)
returned_scores.py   what such a function returned: a number, or rewards of steps, for each response
judge.py             ``Judge``: a reward of evaluations, which never trains
gsm8k.py             an example of such a function: GSM8K's exact answer
reward_server.py     a server that scores over HTTP (--reward_url)
running_stats.py     running mean and standard deviation of raw scores (--normalize_reward)
time_limit.py        the time limit of the user's function and of the server (--reward_timeout)
"""
