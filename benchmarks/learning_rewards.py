"""The rewards and judges of learning.py's tasks on dreams: functions of texts, for ``--reward_fn``.

The model writes short dreams of two kinds of words: of nature, and of machines. A text is good if it speaks
of nature. A word counts at most ``MOST`` times and repeated trigrams are taken off, so that no word and no
phrase that is written again and again has a high score.
"""

import re
from collections import Counter

WORD = re.compile(r"[a-z]+")
MOST = 3  # times that a word counts
LEAST = 20  # a text of fewer words counts as one of so many: ending early does not pay
NATURE = """
bloom blooms bloomed blossom blossoms breeze bright chorus clear dance dances dancing dawn dew distant
dream dreams echo echoes evening fire flicker flickers flow flower flowers flowing fog forest fragile
garden gentle gently glow golden harmony harmonies haze hum hums landscape leaf leaves light lights
melody mist moon morning mountain night ocean petal petals rain rhythm ripple ripples river sea shadow
shadows shimmer shimmering silence sky soft softly song spring stars stone stream sun sweet swirl
swirling tapestry tendrils thread threads unfurl valley valleys water wave waves whisper whispers wind
wings wisps woven
"""
MACHINE = """
accuracy activation activations algorithm bias biases binary bit bits classification classify cluster
clusters code confidence convolution convolutional correction data dataset decision descent dimension
dimensional dimensions domain embedding embeddings error errors feature features filter filters gradient
gradients input inputs latent layer layers loss manifold manifolds maps margin margins matrices matrix
metrics minima network neural neurons nodes noise output outputs parameter parameters pixel pixels
precision probabilities probability recalibrate recognition regularization score scores similarity space
spaces synapses synaptic tensor threshold thresholds vector vectors weight weights
"""
NATURE, MACHINE = set(NATURE.split()), set(MACHINE.split())


def repeated(words):
    """The share of trigrams that repeat an earlier one, 0 for texts of fewer than three words."""
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def share(words, wanted):
    """The share of words that are ``wanted``; each of them counts at most ``MOST`` times. A short text counts
    as one of ``LEAST`` words."""
    found = Counter(word for word in words if word in wanted)
    return sum(min(count, MOST) for count in found.values()) / max(len(words), LEAST)


def nature(prompts, responses, answers):
    """The reward of task (c): ten times the share of nature's words, less ten times that of repetitions."""
    texts = [WORD.findall(text.lower()) for text in responses]
    return [10 * (share(words, NATURE) - repeated(words)) for words in texts]


def gold(prompts, responses, answers):
    """What the pairs of task (d) are labelled by: nature's words less machines' words and repetitions. No
    policy is trained on it."""
    texts = [WORD.findall(text.lower()) for text in responses]
    return [10 * (share(words, NATURE) - share(words, MACHINE) - repeated(words)) for words in texts]


def spelling(known, responses):
    """The share of words in each text that are among the ``known`` ones: a judge that never trains."""
    texts = [WORD.findall(text.lower()) for text in responses]
    return [sum(word in known for word in words) / max(len(words), 1) for words in texts]
