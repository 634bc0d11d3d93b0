"""Checks that the Hugging Face hub can be reached, before a model or tokenizer is fetched from it.

Without a network, huggingface_hub tries each file six times, with longer and longer pauses. Its error would
come only after most of a minute (46 s measured).
"""

import os
import ssl
import threading
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from errors import InputError


def check_hub(name):
    """Raise ``InputError`` if ``name`` has to be fetched from the hub, and the hub cannot be reached.

    No request is sent for a folder, for a name with any file in the cache, or with HF_HUB_OFFLINE=1.
    HF_ENDPOINT and the proxy variables work as in huggingface_hub. The time limit is HF_HUB_ETAG_TIMEOUT
    (10 s), after which huggingface_hub gives up as well.
    """
    if os.path.isdir(name) or constants.HF_HUB_OFFLINE or _is_cached(str(name)):
        return
    if reason := _why_unreachable(constants.ENDPOINT, constants.HF_HUB_ETAG_TIMEOUT):
        raise InputError(
            f"{constants.ENDPOINT} cannot be reached ({reason}); give a directory, or connect to the network"
        )


def _is_cached(name):
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return any(folder.glob("snapshots/*/*"))


def _why_unreachable(url, seconds):
    """Why no server answers at a URL; '' if one answers, whatever its answer is."""
    outcome = []

    def ask():
        try:
            urlopen(Request(url, method="HEAD"), timeout=seconds).close()
            outcome.append("")
        except (HTTPError, HTTPException):
            outcome.append("")
        except OSError as error:
            reason = getattr(error, "reason", error)  # a URLError has the cause in it
            is_answer = isinstance(reason, ssl.SSLError)  # and huggingface_hub may know other certificates
            outcome.append("" if is_answer else str(reason) or type(reason).__name__)

    # The thread limits the total time: urlopen's timeout is per address, a host name can have many addresses,
    # and the look-up of the name has a timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no answer within {seconds:g} s"
