// A driver library that knows its version and little else, as an old one would.
extern "C" int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
extern "C" int cuGetErrorName(int, const char**) { return 1; }
