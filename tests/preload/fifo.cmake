# Runs a client program whose report is to be written to a FIFO that no process reads. The program must end, and must
# print why there is no report.
file(REMOVE "${FILE}")
execute_process(COMMAND mkfifo "${FILE}" COMMAND_ERROR_IS_FATAL ANY)
set(ENV{LD_PRELOAD} "${LIBRARIES}")
set(ENV{MPGPU_PRELOAD_REPORT} "${FILE}")
execute_process(COMMAND "${PROGRAM}" linked copies TIMEOUT 120 RESULT_VARIABLE result ERROR_VARIABLE said)
unset(ENV{LD_PRELOAD})
file(REMOVE "${FILE}")
if(NOT result EQUAL 0 OR NOT said MATCHES "MPGPU_PRELOAD_REPORT=.*: is not a regular file")
    message(FATAL_ERROR "the client has ended with ${result}, and said: ${said}")
endif()
