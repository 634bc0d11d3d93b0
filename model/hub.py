"""Is the hub there? Asked once, before a name is looked for there.

huggingface_hub tries each file of a name six times, later and later, which without a network takes the better
part of a minute (46 s measured) before the error comes.
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

    Nothing is asked for a folder, for a name of which something is in the cache, and with HF_HUB_OFFLINE=1.
    HF_ENDPOINT and the proxy variables count as they do for huggingface_hub; a hub that does not answer
    within HF_HUB_ETAG_TIMEOUT (10 s) would be given up by that as well.
    """
    if os.path.isdir(name) or constants.HF_HUB_OFFLINE or _is_cached(str(name)):
        return
    if reason := _silence(constants.ENDPOINT, constants.HF_HUB_ETAG_TIMEOUT):
        raise InputError(f"{constants.ENDPOINT} cannot be reached ({reason}); give a directory, or connect")


def _is_cached(name):
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return any(folder.glob("snapshots/*/*"))


def _silence(url, seconds):
    """Why nobody answers at a URL, '' if somebody does, whatever the answer."""
    outcome = []

    def ask():
        try:
            urlopen(Request(url, method="HEAD"), timeout=seconds).close()
            outcome.append("")
        except (HTTPError, HTTPException):
            outcome.append("")
        except OSError as error:
            reason = getattr(error, "reason", error)  # of a URLError
            is_answer = isinstance(reason, ssl.SSLError)  # huggingface_hub may know other certificates
            outcome.append("" if is_answer else str(reason) or type(reason).__name__)

    # In a thread, since the timeout is of one address, and names have many, and a name server has its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"no answer within {seconds:g} s"
