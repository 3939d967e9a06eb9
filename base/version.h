#pragma once

#define KVTAMP_VERSION "0.1.0"
