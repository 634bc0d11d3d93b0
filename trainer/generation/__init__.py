"""Generation: how responses are sampled, with a KV cache and continuous batching. The files of this folder:

engine.py          prompts -> responses: the sampler and its decoding loop; where a response ends
kv_cache.py        the preallocated keys and values of the sequences that decode together
rotary_table.py    rotary positions from a table, on a GPU
sampler_copy.py    the sampler's own copy of a policy, laid out for speed; which policy is sampled
sampling.py        logits -> tokens and their log-probs
sampling_noise.py  the random number behind each token, a pure function of seed, step, prompt and token
stops.py           stop strings: where the text of a response first has one
stop_checks.py     which sequences have reached one, while they are sampled
results.py         the responses behind their prompts, as a rollout, and their texts
cuda_graphs.py     decoding steps as CUDA graphs; a list of all code that runs only on a GPU
done_flags.py      which sequences have finished, without waiting for a GPU
experts.py         mixtures of experts while decoding on a GPU, without shapes that depend on data
"""
