# Installs headers, libraries, a CMake package (find_package(imbrex), targets imbrex::imbrex for C++ and imbrex::shared for the C ABI) and
# what pkg-config reads.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/imbrex)
install(TARGETS imbrex imbrex_shared EXPORT imbrex_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library)
install(DIRECTORY include/imbrex DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(EXPORT imbrex_targets NAMESPACE imbrex:: DESTINATION ${package_dir} COMPONENT library)
configure_package_config_file(cmake/imbrex-config.cmake.in imbrex-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(imbrex-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/imbrex-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/imbrex-config-version.cmake
  DESTINATION ${package_dir} COMPONENT library)
configure_file(cmake/imbrex.pc.in imbrex.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/imbrex.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
