// What FlagCX's adaptor.cc leaves undefined where it is built for no vendor: both adaptors come from plugins then.

#include "adaptor.h"

struct flagcxCCLAdaptor* cclAdaptors[NCCLADAPTORS] = {&bootstrapAdaptor, nullptr};

static struct flagcxDeviceAdaptor none = {};
struct flagcxDeviceAdaptor* deviceAdaptor = &none;
