"""Generation: how responses are sampled, with a KV cache and continuous batching. The files of this folder:

engine.py          prompts -> responses: the sampler and its decoding loop; where a response ends
kv_cache.py        the preallocated keys and values of the sequences that decode together
sampler_copy.py    the sampler's own copy of a policy, laid out for speed; which policy is sampled
sampling.py        logits -> tokens and their log-probs
sampling_noise.py  the random number behind each token, a pure function of seed, step, prompt and token
cuda_graphs.py     decoding steps as CUDA graphs; a list of all code that runs only on a GPU
"""
