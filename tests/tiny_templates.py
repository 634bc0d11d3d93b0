"""Chat templates that behave as those of known families do, and a tokenizer with one of them."""

import copy

START = "{% for m in messages %}"
HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LISTED = "{% if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}"
LISTED += (
    "{{ messages[0].content + '\\n' }}{% endif %}{{ '# Tools' }}{% for t in tools %}{{ '\\n' + t | tojson }}"
)
LISTED += "{% endfor %}{{ '<|im_end|>\\n' }}{% elif messages[0].role == 'system' %}"
LISTED += "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
QWEN = LISTED + START + "{% if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
QWEN += "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content }}"
QWEN += "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}"
QWEN += '{{ \'<tool_call>\\n{"name": "\' }}'
QWEN += (
    "{{ c.function.name + '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
)
QWEN += "{% endfor %}{{ '<|im_end|>\\n' }}{% elif m.role == 'tool' %}"
QWEN += "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
QWEN += "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
QWEN += "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
QWEN += "{% endif %}{% endfor %}" + HEADER
LLAMA = (
    START
    + "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{{ '<|im_start|>assistant\\n{\"name\": ' }}"
)
LLAMA += "{{ c.name | tojson }}{{ ', \"parameters\": ' }}{{ c.arguments | tojson }}{{ '}<|im_end|>' }}"
LLAMA += "{% elif m.role == 'tool' %}{{ '<|im_start|>ipython\\n' }}{{ m.content | tojson }}{{ '<|im_end|>' }}"
LLAMA += (
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    + HEADER
)
ALL = START + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}" + HEADER
PHI = START + "{% if m.role in ('system', 'user', 'assistant') %}{{ '<|im_start|>' + m.role + '\\n' }}"
PHI += "{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
PHI += (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)

READS = START + "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
READS += "{{ m.reasoning_content or '' }}{{ '\\n</think>\\n\\n' }}"
READS += "{% else %}{{ '<|im_start|>' + m.role + '\\n' }}{% endif %}"
READS += "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
READS += "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
CHANNELS = START + "{{ '<|im_start|>' + m.role }}{% if 'thinking' in m %}"
CHANNELS += "{{ '<analysis>' + m.thinking + '<end>' }}{% endif %}"
CHANNELS += "{{ '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
CHANNELS += "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"

# Qwen 3: a thought of the past is left out, an empty one is written into the last turn, and into a new one
# that may not think.
LATER = "{% set n = namespace(last=-1) %}" + START
LATER += "{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
PAST = "{{ m.content if '</think>' not in m.content or loop.index0 > n.last"
PAST += " else m.content.split('</think>')[-1].lstrip('\\n') }}"
EMPTY = "<think>\\n\\n</think>\\n\\n"
QWEN3 = LATER + QWEN.replace(
    "'<|im_start|>assistant\\n' + m.content }}",
    "'<|im_start|>assistant\\n' }}{% if loop.last and '</think>' not in m.content %}{{ '"
    + EMPTY
    + "' }}{% endif %}"
    + PAST,
)
QWEN3 += "{% if add_generation_prompt and enable_thinking is false %}{{ '" + EMPTY + "' }}{% endif %}"
# MiniMind 3: each turn of the assistant's has a thought; the header opens one, or closes it as well.
MINIMIND3 = QWEN.removesuffix(HEADER).replace(
    "'<|im_start|>assistant\\n' + m.content }}",
    "'<|im_start|>assistant\\n<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content }}",
)
MINIMIND3 += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
MINIMIND3 += "{{ '<think>\\n' if open_thinking else '" + EMPTY + "' }}{% endif %}"
HERMES = LISTED + START + "{% if m.role == 'tool' %}"
HERMES += "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}{% endif %}"
HERMES += "{{ '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}"
HERMES += "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>' }}{% endif %}{% else %}"
HERMES += "{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for c in m.tool_calls or [] %}"
HERMES += "{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}"
HERMES += "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}" + HEADER
# Llama 3: a BOS, the tools in the first turn of the user's, results as JSON, no newline behind a turn.
ROLE = "{{ '<|start_header_id|>' + (m.role if m.role != 'tool' else 'ipython') + '<|end_header_id|>\\n\\n' }}"
LLAMA3 = (
    "{{ bos_token }}"
    + START
    + ROLE
    + "{% if tools and loop.first %}{{ tools | tojson(indent=4) }}{% endif %}"
)
LLAMA3 += "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
LLAMA3 += "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
LLAMA3 += "{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
LLAMA3 += "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
# Mistral: no header; the tools before the last turn of the user's.
MISTRAL = "{{ bos_token }}" + START + "{% if m.role == 'user' %}"
MISTRAL += "{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
MISTRAL += "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
MISTRAL += "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
MISTRAL += "{{ '[TOOL_RESULTS]' + m.content | tojson + '[/TOOL_RESULTS]' }}"
MISTRAL += "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
# Gemma: two roles that take turns, contents without white space around them.
GEMMA = "{{ bos_token }}" + START
GEMMA += "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
GEMMA += "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
GEMMA += "{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
GEMMA += "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def with_tokens(tokenizer, template, eos, *more):
    """The same with more special tokens. The first of all, ``eos``, ends a turn."""
    tokenizer = with_template(tokenizer, template)
    tokenizer.add_special_tokens({"eos_token": eos, "bos_token": "<s>", "additional_special_tokens": [*more]})
    return tokenizer
