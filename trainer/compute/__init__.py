"""Compute: the forward passes that PPO, sampling and the other scripts share. The files of this folder:

rollout_data.py  the data of one batch: tokens, lengths, log-probs, values, advantages
scoring.py       log-probs and values of given responses; where the value of a token is read
batching.py      cuts sequences into micro-batches by tokens, and pads them
layout.py        where the tokens of a micro-batch lie: index tables, made once for all its forwards
packing.py       sequences one behind the other in one row, so that no padding is computed
attention.py     attention for packed rows and for decoding, registered with transformers
flash.py         attention for packed rows by torch's flash kernels, on GPUs that have them
fused_layers.py  the layers of Llama and its relatives in fewer operations
logprobs.py      log-probs of tokens and their gradient, without the logits of a whole batch
early_ends.py    no EOS before --min_gen_len: the same in the sampler and in all scorers
sharding.py      models split over processes: each keeps a part, and all go through them in step
balance_loss.py  the load-balancing loss of a mixture of experts
precision.py     fp32, bf16, fp16 and TF32: which dtype a device computes in
loss_scale.py    the scale of the loss in fp16, so that small gradients do not become 0
memory.py        what happens when memory runs out; freed memory is kept for reuse
free_memory.py   how much memory is free, on a GPU, on the machine and in a container
host_memory.py   frozen models that wait outside the GPU
threads.py       CPU threads: how many there are, and how they wait on a machine that others use too
kernels.py       which compiled kernels there are for some tensors: those of the two folders below
cpu/             what a model computes besides matrix products, in C, compiled for this machine's CPU
cuda/            the same in Triton, for GPUs
"""
