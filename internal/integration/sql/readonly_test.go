package sql_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/internal/integration/testproxy"
	"github.com/devmappa/watermill-inbox/internal/servers"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// A connection that cannot write, and never will, is closed: the next one is good as soon as the server is. Each use
// has a pool of one connection.
func TestReadOnlyConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	key := inbox.Key{Consumer: "c", MessageID: "1"}
	uses := map[string]func(context.Context, testdb.Way) error{
		"claim": func(ctx context.Context, way testdb.Way) error {
			transaction, _, err := way.Claim(ctx, inbox.ClaimParams{Key: key})
			if err != nil {
				return err
			}
			return transaction.Rollback()
		},
		"mark": func(ctx context.Context, way testdb.Way) error {
			_, err := way.MarkSent(ctx, []inbox.Record{{Key: key, ProcessedAt: time.Now()}})
			return err
		},
		"delete": func(ctx context.Context, way testdb.Way) error {
			_, _, err := way.DeleteProcessed(ctx, inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now(), Limit: 1})
			return err
		},
		"check": func(ctx context.Context, way testdb.Way) error { return way.Check(ctx) },
	}
	// Both servers have a schema for each use.
	primary, standby := ownServer(t), ownServer(t)
	for _, address := range []string{primary.URL(), standby.URL()} {
		for use := range uses {
			for _, driver := range testdb.Ways {
				schema := use + "_" + driver
				db := &testdb.Database{Driver: "postgres", URL: withParameters(t, address, "search_path", schema), Adapter: inboxsql.DefaultPostgreSQLSchema{}}
				db.DB = db.Open(t)
				db.SetMaxIdleConns(0) // the server is restarted
				db.MustExec(t, `CREATE SCHEMA `+schema)
				db.Repository(t, inboxsql.Options{})
			}
		}
	}
	makeStandby(t, standby)
	admin := &testdb.Database{Driver: "postgres", URL: primary.URL()}
	admin.DB = admin.Open(t)
	standbyHost := (&testdb.Database{URL: standby.URL()}).Address(t)

	// Each returns an address, and what makes new connections to it read-only or not. Those that are open stay as they are.
	kinds := map[string]func(t *testing.T, role string) (string, func(bool)){
		"a standby for a moment": func(t *testing.T, _ string) (string, func(bool)) {
			proxy := testproxy.New(t, admin.Address(t))
			address := strings.Replace(primary.URL(), admin.Address(t), proxy.Address(), 1)
			return address, func(readOnly bool) {
				if readOnly {
					proxy.Lead(standbyHost)
				} else {
					proxy.Lead(admin.Address(t))
				}
			}
		},
		"a read-only role for a moment": func(t *testing.T, role string) (string, func(bool)) {
			admin.MustExec(t, `CREATE ROLE `+role+` SUPERUSER LOGIN`)
			return strings.Replace(primary.URL(), "//postgres@", "//"+role+"@", 1), func(readOnly bool) {
				admin.MustExec(t, fmt.Sprintf(`ALTER ROLE %s SET default_transaction_read_only = %v`, role, readOnly))
			}
		},
	}
	for kind, prepare := range kinds {
		for use, run := range uses {
			for _, driver := range testdb.Ways {
				t.Run(strings.Join([]string{kind, use, driver}, ", "), func(t *testing.T) {
					t.Parallel()
					ctx, schema := context.Background(), use+"_"+driver
					name := "test_" + testdb.RandomName()
					address, readOnly := prepare(t, name)
					way := admin.Way(t, driver, withParameters(t, address, "search_path", schema, "application_name", name), 1)
					if err := way.Check(ctx); err != nil {
						t.Fatal(err)
					}
					readOnly(true)
					terminateNamed(t, admin, name)
					for range 2 { // the first one may only find the connection dead
						t.Logf("while it is read-only: %v", run(ctx, way))
					}
					readOnly(false)
					if err := run(ctx, way); err != nil {
						t.Errorf("the connection is still there: %v", err)
					}
				})
			}
		}
	}
}

func withParameters(t testing.TB, address string, namesAndValues ...string) string {
	t.Helper()
	parsed, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	query := parsed.Query()
	for i := 0; i < len(namesAndValues); i += 2 {
		query.Set(namesAndValues[i], namesAndValues[i+1])
	}
	parsed.RawQuery = query.Encode()
	return parsed.String()
}

// makeStandby turns the server into a hot standby, which has what it had and takes no more.
func makeStandby(t testing.TB, server *servers.PostgreSQL) {
	t.Helper()
	on := &testdb.Database{Driver: "postgres", URL: server.URL()}
	on.DB = on.Open(t)
	on.SetMaxIdleConns(0)
	var folder string
	if err := on.QueryRow(`SHOW data_directory`).Scan(&folder); err != nil {
		t.Fatal(err)
	}
	on.MustExec(t, `COPY (SELECT WHERE false) TO '`+folder+`/standby.signal'`)
	if err := server.Restart(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// terminateNamed ends the sessions of that application_name and waits for their end.
func terminateNamed(t testing.TB, admin *testdb.Database, name string) {
	t.Helper()
	eventually(t, "the sessions end", func() bool {
		return admin.Count(t, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1`, name) == 0
	})
}
