import datasets
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` writes out of the user's cache, and out of the folders the tests read.

    Nor does it tell the Hub that a file was read, which takes seconds where there is no net, or sleep for five seconds
    after each shuffled pass, which it does against crashes in remote file systems.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
