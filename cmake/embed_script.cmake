# Writes OUT: a .cpp that defines `const std::string_view imbrex::NAME` with the bytes of IN.
file(READ ${IN} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUT} "#include <string_view>\nnamespace imbrex {\nstatic const unsigned char bytes[] = {${bytes}0};\n"
  "extern const std::string_view ${NAME};\n"
  "const std::string_view ${NAME}(reinterpret_cast<const char*>(bytes), sizeof bytes - 1);\n}  // namespace imbrex\n")
