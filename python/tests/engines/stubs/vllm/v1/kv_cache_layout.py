from enum import Enum


class KVCacheLayout(Enum):
    """Which of the axes L(ayer), B(lock), H(ead), N (token), C(ontent) comes where in memory, outermost first."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)
