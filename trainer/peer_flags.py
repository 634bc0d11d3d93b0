"""Flags of MiniMind, TRL, OpenRLHF and verl that are called otherwise here: what a command with their names
is told.

Names are those of MiniMind's scripts (2025 and 2026), TRL 0.11 to 1.16, OpenRLHF 0.8 to 0.11 and verl's PPO
(2025). Single names are of LightRFT. A * stands for any rest of a name. A name with dots (OpenRLHF from
0.10.2 on, verl) is found by its longest ending that is here or a flag of ours:
``actor_rollout_ref.critic.optim.lr`` by ``critic.optim.lr``.
"""

from fnmatch import fnmatchcase

# their flag, the flag of train_ppo.py that does the same, and where the value is another one too, that
_CALLED = """
# MiniMind
save_dir                            out_dir
from_weight                         model                   the path of the .pth
weight                              model                   the path of the .pth
from_resume                         resume                  auto
ppo_update_iters                    ppo_epochs
early_stop_kl                       target_kl
debug_interval                      log_interval
load_from                           model
lora_name                           model                   the path of the .pth, beside full_sft_*.pth
lora_weight                         model                   the path of the .pth, beside full_sft_*.pth
# MiniMind and TRL
reward_model_path                   reward_model
# TRL: PPO
sft_model_path                      model
model_name_or_path                  model  # TRL's PPO scripts take only the tokenizer from it
num_ppo_epochs                      ppo_epochs
response_length                     max_gen_len
cliprange                           clip_epsilon
per_device_train_batch_size         batch_size  # there times gradient_accumulation_steps
num_train_epochs                    epochs                  a whole number
# TRL: data
dataset_name                        data_path
# TRL: several turns
environment_factory                 env                     path.py:Class, the same class
max_tool_calling_iterations         max_turns               one more: the last answer is a turn too
# TRL: run and machine
output_dir                          out_dir
logging_steps                       log_interval
save_steps                          save_interval
save_total_limit                    keep_checkpoints
eval_steps                          eval_interval
metric_for_best_model               best_metric  # higher is better
resume_from_checkpoint              resume                  auto, or a run or checkpoint folder
report_to                           tracker                 swanlab, tensorboard, wandb or none
project                             wandb_project
max_grad_norm                       grad_clip
dataloader_num_workers              num_workers
use_peft                            lora_r                  the rank
bf16                                dtype                   bfloat16
fp16                                dtype                   float16
torch_dtype                         dtype  # of mixed precision: the trained weights stay float32
use_cpu                             device                  cpu
# TRL up to 0.11, the first PPOTrainer
log_with                            tracker                 swanlab, tensorboard, wandb or none
tracker_project_name                wandb_project
use_score_scaling                   normalize_reward        1
# TRL: GRPO and RLOO
beta                                kl_coef  # reward per nat; of GRPO there: times the std of the scores
max_prompt_length                   max_seq_len  # longer prompts are dropped here
max_completion_length               max_gen_len
epsilon                             clip_epsilon
epsilon_high                        clip_epsilon_high       with cispo 1 less: how far above 1
delta                               dual_clip
importance_sampling_level           policy_loss             gspo is the one of sequences
mask_truncated_completions          mask_truncated          1
num_iterations                      ppo_epochs
reward_funcs                        reward_fn               path.py:function
reward_model_name_or_path           reward_model
reward_weights                      reward_fn               path.py:function=WEIGHT
vllm_importance_sampling_clip_max   importance_cap
vllm_importance_sampling_cap        importance_cap
# TRL: all stages
chat_template_path                  prompt_template         a file
max_length                          max_seq_len  # longer records are dropped here
data_seed                           seed
activation_checkpointing            gradient_checkpointing  1
# OpenRLHF up to 0.10.1 (underscores), and from 0.10.2 on (dots)
pretrain                            model
reward_pretrain                     reward_model
reward.model_name_or_path           reward_model
agent_func_path                     env                     path.py:Class
remote_rm_url                       reward_url  # a .py file there: --reward_fn
reward.remote_url                   reward_url
critic_pretrain                     critic_init             actor or reward
critic.model_name_or_path           critic_init             actor or reward
ref_reward_offload                  offload_frozen          1
prompt_data                         data_path
data.prompt_dataset                 data_path
eval_dataset                        eval_data_path
eval.dataset                        eval_data_path
input_key                           prompt_key
label_key                           answer_key
input_template                      prompt_template         {prompt} where there was {}
prompt_max_len                      max_seq_len
generate_max_len                    max_gen_len
max_new_tokens                      max_gen_len
min_new_tokens                      min_gen_len             one more: here the EOS counts
min_tokens                          min_gen_len             one more: here the EOS counts
stop_strings                        stop
stop_sequences                      stop
stop_token_id                       stop_token_ids
num_episodes                        epochs
max_epochs                          ppo_epochs
actor_learning_rate                 learning_rate
lr                                  learning_rate
critic.adam.lr                      critic_learning_rate
max_norm                            grad_clip
eps_clip                            clip_epsilon
eps_clip_low_high                   clip_epsilon_high       the upper one; --clip_epsilon is the lower one
vllm_is_truncated_threshold         importance_cap
value_clip                          cliprange_value  # here in standard deviations of the returns
lambd                               lam
lr_scheduler_type                   lr_schedule             cosine or constant
lr_scheduler                        lr_schedule             cosine or constant
warmup_steps                        lr_warmup_steps         a number of batches
init_kl_coef                        kl_coef  # TRL up to 0.11 as well
algo.kl.init_coef                   kl_coef
n_samples_per_prompt                num_generations
rloo_k                              num_generations  # TRL's RLOO up to 0.22
advantage_estimator                 advantage               gae, rloo, group or reinforce
algo.advantage.estimator            advantage               gae, rloo, group or reinforce
dynamic_filtering                   filter_groups           how often to sample such a prompt again
top_entropy_quantile                entropy_top  # TRL's GRPO
high_entropy_token_ratio            entropy_top  # LightRFT: of each answer; here of the batch
entropy_loss_coef                   entropy_coef  # here in reward units
entropy_coeff                       entropy_coef  # verl, in units of the advantages
target                              kl_target  # TRL up to 0.11
horizon                             kl_horizon  # TRL up to 0.11
use_kl_loss                         kl_in                   loss  # without it as --kl_in reward
algo.kl.use_loss                    kl_in                   loss
pretrain_data                       ptx_data_path
freezing_actor_steps                critic_warmup_steps
critic.freezing_steps               critic_warmup_steps
reward.normalize_enable             normalize_reward        1
overlong_buffer_len                 overlong_buffer
overlong_penalty_factor             overlong_penalty
lora_rank                           lora_r
ds.lora.rank                        lora_r
param_dtype                         dtype                   bfloat16
actor.gradient_checkpointing_enable gradient_checkpointing  1
full_determinism                    deterministic
train.full_determinism_enable       deterministic
save_path                           out_dir
max_ckpt_num                        keep_checkpoints
ckpt.max_num                        keep_checkpoints
load_checkpoint                     resume                  auto
ckpt.load_enable                    resume                  auto
eval.steps                          eval_interval
logger.wandb.key                    tracker                 wandb  # a key there
use_tensorboard                     tracker                 tensorboard  # a folder there
wandb_run_name                      run_name
# verl
model.path                          model
critic.model.path                   critic_init             actor or reward
reward_model.model.path             reward_model
custom_reward_function.path         reward_fn               path.py:function
multi_turn.max_assistant_turns      max_turns
train_files                         data_path
val_files                           eval_data_path
max_response_length                 max_gen_len
rollout.n                           num_generations
adv_estimator                       advantage               gae, rloo, group or reinforce
ppo_mini_batch_size                 mini_batch_size         answers, --num_generations for each prompt
critic.optim.lr                     critic_learning_rate
critic.learning_rate                critic_learning_rate
clip_grad                           grad_clip
clip_ratio                          clip_epsilon
clip_ratio_low                      clip_epsilon
clip_ratio_high                     clip_epsilon_high
clip_ratio_c                        dual_clip
loss_mode                           policy_loss             clip, cispo or gspo
kl_loss_coef                        kl_coef
use_kl_in_reward                    kl_in                   reward
kl_ctrl.target_kl                   kl_target               nats a response, not a token
filter_groups.enable                filter_groups           how often to sample such a prompt again
overlong_buffer.len                 overlong_buffer
overlong_buffer.penalty_factor      overlong_penalty
enable_gradient_checkpointing       gradient_checkpointing  1
critic_warmup                       critic_warmup_steps
total_epochs                        epochs
total_training_steps                max_steps
save_freq                           save_interval
test_freq                           eval_interval
default_local_dir                   out_dir
resume_mode                         resume                  auto, or a run or checkpoint folder
trainer.logger                      tracker                 swanlab, tensorboard, wandb or none
project_name                        wandb_project
experiment_name                     run_name
"""

# what has no flag here, and what to do instead, or why
_NOT_HERE = """
# sizes: the same thing in other units
num_mini_batches: set --mini_batch_size to --batch_size divided by it
gradient_accumulation_steps: it makes TRL's batch larger, so multiply --batch_size by it
generation_batch_size: set --batch_size to it divided by the number of processes
steps_per_generation: --batch_size is what is sampled at once, --mini_batch_size what a step learns from
total_episodes: set --max_steps to it divided by --batch_size and by the number of processes
rollout_batch_size rollout.batch_size data.train_batch_size:
    --batch_size counts answers of a process: multiply by --num_generations and
    divide by the number of processes
train_batch_size train.batch_size: set --mini_batch_size to it divided by the number of processes
max_len: set --max_seq_len for the prompt and --max_gen_len for the response
# not needed
micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
    auto_find_batch_size torch_empty_cache_steps:
    not needed, micro-batches are cut by tokens and halved when memory runs out
local_rollout_forward_batch_size log_prob_micro_batch_size_per_gpu micro_rollout_batch_size
    per_device_eval_batch_size:
    not needed, batches without gradients are cut by tokens
stop_token: not needed, a response ends at the tokenizer's EOS; --stop and --stop_token_ids name more
apply_chat_template: not needed, the tokenizer's chat template is used where there is one
enable_thinking open_thinking: a switch of the chat template; give it in --chat_template_kwargs
use_compile torch_compile* use_liger_kernel liger_kernel_config:
    not needed, kernels and CUDA graphs are chosen for the device
rollout_engine use_vllm vllm_* rollout.name gpu_memory_utilization tensor_model_parallel_size sglang_*
    use_transformers_* transformers_continuous_batching_config cache_implementation:
    not needed, the training processes sample the responses themselves
save_weight: the name of the result is fixed; --out_dir says where it goes
val_before_train eval_on_start: not needed, with --eval_data_path there is an evaluation before training
n_gpus_per_node: nproc_per_node of torchrun says how many processes there are
nnodes: nnodes of torchrun says how many machines there are
use_dynamic_bsz: not needed, micro-batches are always cut by tokens
filter_overlong_prompts: not needed, prompts that are too long are always dropped and counted
# not supported
top_p top_k min_p generation_kwargs vllm_structured_outputs_regex:
    samples come from the whole distribution, so that the log-probs are those of the policy
kl_estimator kl_loss_type kl_penalty: --kl_in says which one: loss takes k2, reward takes k1
whiten_rewards normalize_advantages: rewards are not whitened, advantages always are
reward_clip_range: scores of reward models are always clipped to -3 and 3
zero_stage deepspeed fsdp fsdp_* ds3_gather_for_generation:
    --shard 1 splits models, gradients and moments over the processes
push_to_hub hub_*: nothing is uploaded; export.py writes a Hugging Face directory
lr_warmup_ratio: --lr_warmup_steps says in how many batches the rates rise
adap_kl_ctrl: not needed, a --kl_target above 0 switches it on
dataset_train_split prompt_split: add it to the name in --data_path, as user/name:split
dataset_test_split eval_split: add it to the name in --eval_data_path, as user/name:split
# flags of PPO, in stages 1 and 2
accumulation_steps: micro-batches are cut by tokens; in MiniMind it makes the batch larger, so multiply
    --batch_size by it
use_moe: name the _moe.pth in --model
# ours, until November 2026
extra_layers parting_coef lm_coef score_penalty: only the demo's reward model needs it, and
    dataset/demo/make_reward.py has it; leave it out
reference reference_samples center_rewards_coefficient:
    leave it out, scores are centred on the answers to the held-out records
grad_sum_dtype: leave it out, gradients are summed in float32
strict_health: leave it out; a run that is broken says "health: wrong" in its output
# TRL's GRPO
router_aux_loss_coef: it is the one in the model's config.json
model_init_kwargs: models are loaded in float32 and compute in --dtype; all else is chosen for them
model_revision: download that revision and name its directory
cast_lm_head_to_fp32: softmax and log-probs are always float32; --dtype float32 makes all products so
remove_unused_columns: not needed, a --reward_fn gets the fields that its parameters name
num_generations_eval: an evaluation samples --num_generations answers to a prompt, and one greedily
shuffle_dataset: records are always shuffled, in each epoch anew, by --seed
multi_objective_aggregation: parts are summed; --normalize_reward 1 normalizes each of them before
sapo_* vespo_*: --policy_loss has the losses of PPO, CISPO and GSPO only
vllm_importance_sampling_*: each token's loss has its own weight, of at most --importance_cap; 0: none
off_policy_mask_threshold: no answer is masked by its KL; --target_kl ends the actor's updates of a batch
use_bias_correction_kl: not needed, the KL of --kl_in loss always has the weight of the ratio
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target:
    --entropy_coef stays as it is given
sync_ref_model ref_model_mixup_alpha ref_model_sync_steps: the reference is always the policy of the start
max_total_len: set --max_seq_len for the prompt and --max_gen_len for the response, all its turns together
rollout_func: --env plays the turns, or --offline_data_path has answers of your own
tool_config_path: name Python functions with --tools, or a class with --env
# TRL: all stages
dataset_config: download that part of the data set and name its files in --data_path
dataset_streaming: not needed, a file is never held in memory
ignore_bias_buffers: not needed, gradients are summed without DDP
dataset_text_field dataset_kwargs dataset_num_proc: records are read by their form, or by --prompt_key and
    --answer_key
eos_token pad_token: the tokenizer's own is taken; another one stands in its tokenizer_config.json
truncation_mode: nothing is cut; records longer than --max_seq_len are dropped and counted
completion_only_loss assistant_only_loss: of a conversation what the assistant says is learned, of a text all
activation_offloading: --gradient_checkpointing 1 saves that memory
gradient_checkpointing_kwargs activation_checkpointing_kwargs: --gradient_checkpointing 1 is all there is
optim optim_* adam_*: the optimizer is always AdamW; --moments_dtype is the type of its moments
weight_decay: weights do not decay in PPO
lr_scheduler_kwargs: --lr_schedule and --lr_warmup_steps say all of the rates' course
save_strategy save_only_model: --save_interval says after how many steps; a checkpoint is always whole
load_best_model_at_end greater_is_better: with held-out prompts the best weights are always
    kept, those of the highest --best_metric
ddp_*: not needed, torchrun starts the processes, whose gradients are summed
local_rank: torchrun sets it
dataloader_*: not needed, the main process reads the records of each step
# others
loss_type: a loss is always the mean over all tokens; --policy_loss has those of CISPO and GSPO
loss_agg_mode: a loss is always the mean over all tokens of a minibatch
scale_rewards: --advantage group divides by the deviation of a prompt's scores, rloo does not
eval_strategy: --eval_interval says after how many steps; 0 evaluates first and last only
debug_mode log_completions log_completions_hub_repo num_completions_to_print log_unique_prompts:
    not needed, samples.jsonl in the run folder has responses and their scores
log_multimodal: models read texts only
debug_log_ratio: not needed, the metric policy/first_ratio is the ratio in the first minibatch of a step
logging_strategy logging_first_step logging_nan_inf_filter: metrics.jsonl in the run folder has every step;
    --log_interval is of the printed lines
ckpt_path: checkpoints are written in the run folder below --out_dir
early_stopping: not needed, a --target_kl above 0 switches it on
use_remove_padding packing_samples pad_to_multiple_of padding_free packing packing_strategy eval_packing:
    not needed, sequences are packed wherever the model allows it
attn_implementation flash_attn: not needed, attention is chosen for the model and the device
colocate_all_models: not needed, all models are on the device of their process
max_samples: shorten the file, or end the run early with --max_steps
lora_alpha: it is always twice --lora_r
lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type:
    --lora_r adapts all linear layers but the head and the routers of experts
use_rslora use_dora: --lora_r trains plain LoRA, scaled by 2 at any rank
lora_dropout disable_dropout: not needed, no model has dropout, nor have adapters
load_in_4bit load_in_8bit bnb_4bit_* use_bnb_nested_quant: weights are not quantized
enable_ema: not needed, an --ema_beta above 0 switches it on
save_hf_ckpt: export.py writes a Hugging Face directory from the result
"""


def _rows(table: str) -> list[str]:
    """The rows of a table without its comments; a row may go on in a line that is indented."""
    rows = (row.partition("#")[0].rstrip() for row in table.replace("\n   ", "").splitlines())
    return list(filter(None, rows))


# their flag -> [ours, and where it is another one the value that ours has then]
PEER_FLAGS = {theirs: ours for theirs, *ours in (row.split(maxsplit=2) for row in _rows(_CALLED))}

NOT_HERE: dict[str, str] = {}  # their flag, or a pattern with * -> what to do instead
for _row in _rows(_NOT_HERE):
    _names, _, _reason = _row.partition(": ")
    NOT_HERE |= dict.fromkeys(_names.split(), _reason)


def reason_of(name: str) -> str:
    """What to do instead of a peer's flag, "" for an unknown one. A whole name comes before patterns, and of
    these the longest first."""
    patterns = sorted(NOT_HERE, key=lambda pattern: ("*" in pattern, -len(pattern)))
    return next((NOT_HERE[pattern] for pattern in patterns if fnmatchcase(name, pattern)), "")
