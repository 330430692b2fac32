//go:build unix

package servers

import (
	"context"
	"database/sql"
	"net"
	"net/url"
	"strings"
	"testing"

	_ "github.com/lib/pq"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

// startPostgreSQL starts a server that ends with the test.
func startPostgreSQL(t *testing.T) *servers.PostgreSQL {
	t.Helper()
	server, err := servers.StartPostgreSQL(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// queryRow runs one query on a connection of its own.
func queryRow(t *testing.T, address, query string) string {
	t.Helper()
	db, err := sql.Open("postgres", address)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var value string
	if err := db.QueryRow(query).Scan(&value); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return value
}

func TestPostgreSQLSettings(t *testing.T) {
	ownTemp(t)
	server := startPostgreSQL(t)
	for name, want := range map[string]string{
		"server_encoding":           "UTF8",
		"lc_collate":                "C",
		"fsync":                     "on",
		"synchronous_commit":        "on",
		"full_page_writes":          "on",
		"max_connections":           "200",
		"max_prepared_transactions": "0",
		"listen_addresses":          "127.0.0.1",
		"unix_socket_directories":   "",
	} {
		if got := queryRow(t, server.URL(), "SELECT current_setting('"+name+"')"); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if got := queryRow(t, server.URL(), "SHOW server_version"); !strings.HasPrefix(got, server.Version()) || server.Version() == "" {
		t.Errorf("Version() = %q, the server says %q", server.Version(), got)
	}
}

func TestPostgreSQLKeepsItsDataAndPort(t *testing.T) {
	ownTemp(t)
	server := startPostgreSQL(t)
	address := server.URL()
	queryRow(t, address, "CREATE TABLE kept AS SELECT 1; SELECT 'done'")
	for _, end := range endings(server) {
		name := end.name
		if err := end.do(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if conn, err := net.Dial("tcp", host(t, address)); err == nil {
			conn.Close()
			t.Fatalf("%s: somebody still listens", name)
		}
		if err := server.Restart(context.Background()); err != nil {
			t.Fatalf("after %s: %v", name, err)
		}
		if server.URL() != address {
			t.Errorf("after %s: the address is %s, it was %s", name, server.URL(), address)
		}
		if got := queryRow(t, address, "SELECT count(*) FROM kept"); got != "1" {
			t.Errorf("after %s: %s rows", name, got)
		}
	}
	if err := server.Restart(context.Background()); err != nil {
		t.Errorf("restart of a running server: %v", err)
	}
}

func TestPostgreSQLStopIsForGood(t *testing.T) {
	folder := ownTemp(t)
	server := startPostgreSQL(t)
	// An open session and transaction do not delay it.
	db, err := sql.Open("postgres", server.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Begin(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := server.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	assertNoProcess(t, folder)
	if err := server.Restart(context.Background()); err == nil {
		t.Error("it started again after Stop")
	}
}

func TestPostgreSQLStartErrorShowsTheLog(t *testing.T) {
	ownTemp(t)
	server := startPostgreSQL(t)
	if err := server.Shutdown(); err != nil {
		t.Fatal(err)
	}
	intruder, err := net.Listen("tcp4", host(t, server.URL()))
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(context.Background()); err == nil || !strings.Contains(err.Error(), "Address already in use") {
		t.Errorf("Restart() on a port in use: %v", err)
	}
	intruder.Close()
	if err := server.Restart(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestStartGivesUpWithItsContext(t *testing.T) {
	ownTemp(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := servers.StartPostgreSQL(ctx); err == nil {
		t.Error("PostgreSQL started")
	}
	if _, err := servers.StartRabbitMQ(ctx); err == nil {
		t.Error("RabbitMQ started")
	}
}

// ending is a way to end a server that keeps its data.
type ending struct {
	name string
	do   func() error
}

// endings are the two ways.
func endings(server interface {
	Shutdown() error
	Kill() error
},
) []ending {
	return []ending{{"Shutdown", server.Shutdown}, {"Kill", server.Kill}}
}

// host is the TCP address in a URL.
func host(t *testing.T, address string) string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}
