// Package servers tests that internal/servers starts, restarts and stops real
// servers and leaves nothing behind.
package servers
