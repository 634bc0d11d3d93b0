"""The models: loading, checks, critic, reward model, LoRA and saving.

The files of this folder:

    loading.py              a .pth, directory or hub name -> language model (fp32, no dropout) and tokenizer
    pretrained.py           ``from_pretrained`` that leaves no buffer uninitialised
    half_precision.py       frozen weights kept in 16 bits, for reward models; score heads in fp32
    minimind_pth.py         how a MiniMind .pth is recognised: keys and shapes of a state-dict -> its config
    model_minimind.py       MiniMind 2 and 3, dense or with experts, as transformers models
    minimind_conversion.py  a MiniMind -> the Llama, Qwen3 or Qwen3-MoE that computes the same, and back
    compatibility.py        checks before training: tokenizer, EOS ids, output head, positions
    critic.py               the critic: a backbone with a value head
    classifier.py           a language model -> a new reward model (a sequence classifier with one label)
    lora.py                 LoRA adapters: adding, merging, and what of a model trains
    shards.py               parameters of which this process has a part
    saving.py               a model -> a .pth with a folder beside it, or a Hugging Face directory
    hub_connection.py       a quick check that the Hugging Face hub can be reached
    demo/                   the trained policy and reward model of the demo, and their tokenizers
"""
