// Package servers gives tests and demos real PostgreSQL and RabbitMQ servers.
//
// For each server asked for, [Ensure] takes the first of these that is there:
//
//  1. an address in WATERMILL_TEST_POSTGRES_URL or WATERMILL_TEST_AMQP_URI,
//     used as it is;
//  2. a private server in a temporary folder on a free loopback port, started
//     from programs found on this machine;
//  3. a container, when a Docker engine answers;
//  4. for root on Debian and its derivatives, the distribution's package,
//     installed without its system service, and then a private server;
//  5. otherwise an error with the commands to run. A missing server is never a
//     reason to skip a test.
//
// A server that was running before is touched only when an address names it.
// Everything that was started is gone after Close or Stop. When the owner is
// killed instead, its servers end with it on Linux, and the next start on the
// machine removes the folder that was left.
//
// Fault tests use [StartPostgreSQL] and [StartRabbitMQ] directly: a private
// server can be shut down or killed and started again on the same port and data.
//
// The package works on unix systems and needs the standard library only.
package servers
