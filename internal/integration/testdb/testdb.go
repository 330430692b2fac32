// Package testdb gives each test a database of its own: a schema on the PostgreSQL server named by
// WATERMILL_TEST_POSTGRES_URL, or a SQLite file.
package testdb

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // driver "pgx"
	"github.com/lib/pq"                // driver "postgres"
	_ "modernc.org/sqlite"             // driver "sqlite"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

// Database is a test's own: an inbox table and a table of effects.
type Database struct {
	*sql.DB
	Driver  string
	URL     string // data source name; in PostgreSQL the schema is the search path
	Fused   bool   // opened through inboxpq.NewConnector
	Adapter inboxsql.SchemaAdapter
}

// PostgreSQLURL is the server's address; the test fails without one.
func PostgreSQLURL(t testing.TB) string {
	t.Helper()
	address := os.Getenv("WATERMILL_TEST_POSTGRES_URL")
	if address == "" {
		t.Fatal("WATERMILL_TEST_POSTGRES_URL is not set; run the tests by make test, which starts a server")
	}
	return address
}

// PostgreSQL makes a schema for the test and opens it with the driver: "postgres" (lib/pq), "fused" (lib/pq
// behind inboxpq.NewConnector) or "pgx".
func PostgreSQL(t testing.TB, driver string) *Database {
	t.Helper()
	if driver == "fused" {
		return PostgreSQLFused(t)
	}
	return PostgreSQLAt(t, driver, PostgreSQLURL(t))
}

// PostgreSQLAt is PostgreSQL on another server.
func PostgreSQLAt(t testing.TB, driver, address string) *Database {
	t.Helper()
	// A transaction that a test has left open fails the clean-up instead of blocking it.
	admin := open(t, "postgres", withParameter(t, address, "lock_timeout", "20s"))
	schema := "test_" + RandomName()
	exec(t, admin, `CREATE SCHEMA `+schema)
	t.Cleanup(func() { exec(t, admin, `DROP SCHEMA `+schema+` CASCADE`) })

	db := &Database{Driver: driver, URL: withParameter(t, address, "search_path", schema), Adapter: inboxsql.DefaultPostgreSQLSchema{}}
	db.DB = open(t, driver, db.URL)
	exec(t, db.DB, `CREATE TABLE effects (effect text NOT NULL)`)
	return db
}

func withParameter(t testing.TB, address, name, value string) string {
	t.Helper()
	parsed, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	query := parsed.Query()
	query.Set(name, value)
	parsed.RawQuery = query.Encode()
	return parsed.String()
}

// SQLite makes a file for the test, in WAL mode with a busy timeout.
func SQLite(t testing.TB) *Database {
	t.Helper()
	return SQLiteWith(t, "_pragma=busy_timeout(20000)&_pragma=journal_mode(WAL)&_pragma=foreign_keys(1)")
}

// SQLiteWith makes a file for the test, opened with the parameters.
func SQLiteWith(t testing.TB, parameters string) *Database {
	t.Helper()
	return SQLiteBy(t, "sqlite", parameters)
}

// SQLiteBy is SQLiteWith by another driver, which the test links.
func SQLiteBy(t testing.TB, driver, parameters string) *Database {
	t.Helper()
	db := &Database{
		Driver:  driver,
		URL:     "file:" + filepath.Join(t.TempDir(), "test.db") + "?" + parameters,
		Adapter: inboxsql.DefaultSQLiteSchema{},
	}
	db.DB = open(t, db.Driver, db.URL)
	exec(t, db.DB, `CREATE TABLE effects (effect text NOT NULL)`)
	return db
}

// PostgreSQLFused is PostgreSQL with lib/pq behind inboxpq.NewConnector.
func PostgreSQLFused(t testing.TB) *Database {
	t.Helper()
	db := PostgreSQL(t, "postgres")
	db.Fused = true
	db.DB = db.Open(t)
	return db
}

// Open opens another pool on the same database.
func (d *Database) Open(t testing.TB) *sql.DB {
	t.Helper()
	if !d.Fused {
		return open(t, d.Driver, d.URL)
	}
	connector, err := pq.NewConnector(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	fused, err := inboxpq.NewConnector(connector)
	if err != nil {
		t.Fatal(err)
	}
	return closeLater(t, sql.OpenDB(fused))
}

// Repository makes a repository on the database and its schema.
func (d *Database) Repository(t testing.TB, options inboxsql.Options) *inboxsql.Repository {
	t.Helper()
	repository := d.RepositoryWithoutSchema(t, options)
	if err := repository.InitializeSchema(context.Background()); err != nil {
		t.Fatal(err)
	}
	return repository
}

// RepositoryWithoutSchema makes a repository and no table.
func (d *Database) RepositoryWithoutSchema(t testing.TB, options inboxsql.Options) *inboxsql.Repository {
	t.Helper()
	options.SchemaAdapter = d.Adapter
	repository, err := inboxsql.NewRepository(d.DB, options)
	if err != nil {
		t.Fatal(err)
	}
	return repository
}

// Subject is the database as the kit's subject.
func (d *Database) Subject(t testing.TB, options inboxsql.Options) inboxtest.RepositorySubject {
	t.Helper()
	return inboxtest.RepositorySubject{
		Repository: d.Repository(t, options),
		Write:      d.Write,
		Effects:    d.Effects,
		HasTransaction: func(ctx context.Context) bool {
			_, ok := inboxsql.TxFromContext(ctx)
			return ok
		},
		Age:           d.Age,
		End:           func(ctx context.Context) error { return handlerTx(ctx, (*sql.Tx).Commit) },
		Abandon:       func(ctx context.Context) error { return handlerTx(ctx, (*sql.Tx).Rollback) },
		FailStatement: func(ctx context.Context) error { return d.execTx(ctx, "SELECT no_such_column FROM effects") },
	}
}

// Write writes an effect through the handler's transaction.
func (d *Database) Write(ctx context.Context, effect string) error {
	return d.execTx(ctx, `INSERT INTO effects (effect) VALUES ($1)`, effect)
}

func handlerTx(ctx context.Context, do func(*sql.Tx) error) error {
	tx, ok := inboxsql.TxFromContext(ctx)
	if !ok {
		return errors.New("no transaction in the context")
	}
	return do(tx)
}

func (d *Database) execTx(ctx context.Context, query string, args ...any) error {
	return handlerTx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, query, args...)
		return err
	})
}

// Effects returns what is committed.
func (d *Database) Effects(ctx context.Context) ([]string, error) {
	rows, err := d.QueryContext(ctx, `SELECT effect FROM effects`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var effects []string
	for rows.Next() {
		var effect string
		if err := rows.Scan(&effect); err != nil {
			return nil, err
		}
		effects = append(effects, effect)
	}
	return effects, rows.Err()
}

// Age makes a record older, together with its unsent messages.
func (d *Database) Age(ctx context.Context, key inbox.Key, by time.Duration) error {
	step, amount := `$1 * interval '1 microsecond'`, by.Microseconds()
	if d.Driver == "sqlite" {
		step, amount = `$1`, by.Milliseconds()
	}
	tx, err := d.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	for _, statement := range []string{
		`UPDATE watermill_inbox SET processed_at = processed_at - ` + step,
		`UPDATE watermill_inbox_unsent SET claimed_at = claimed_at - ` + step + `, stored_at = stored_at - ` + step,
	} {
		if _, err := tx.ExecContext(ctx, statement+` WHERE consumer = $2 AND message_id = $3`, amount, key.Consumer, key.MessageID); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// MustExec runs a statement on the pool; the test fails with it.
func (d *Database) MustExec(t testing.TB, query string, args ...any) {
	t.Helper()
	exec(t, d.DB, query, args...)
}

// Count returns the single number that the query selects.
func (d *Database) Count(t testing.TB, query string, args ...any) int {
	t.Helper()
	var count int
	if err := d.QueryRow(query, args...).Scan(&count); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return count
}

// RandomName returns a name that no other test uses.
func RandomName() string {
	name := make([]byte, 6)
	_, _ = rand.Read(name) // never fails
	return hex.EncodeToString(name)
}

func open(t testing.TB, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	return closeLater(t, db)
}

func closeLater(t testing.TB, db *sql.DB) *sql.DB {
	t.Helper()
	t.Cleanup(func() {
		// database/sql rolls back in a goroutine of its own when a context ends.
		deadline := time.Now().Add(10 * time.Second)
		for db.Stats().InUse != 0 && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond)
		}
		if inUse := db.Stats().InUse; inUse != 0 {
			t.Errorf("%d connections are still in use at the end of the test", inUse)
		}
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func exec(t testing.TB, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// Through returns the same database behind another address, as a proxy's, with a pool of its own.
func (d *Database) Through(t testing.TB, address string) *Database {
	t.Helper()
	parsed, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	parsed.Host = address
	through := *d
	through.URL = parsed.String()
	through.DB = through.Open(t)
	return &through
}

// Address is the server's host and port.
func (d *Database) Address(t testing.TB) string {
	t.Helper()
	parsed, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
	return parsed.Host
}
