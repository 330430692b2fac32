package sql_test

import (
	"context"
	"strings"
	"testing"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Whatever the names hold: a valid key is claimed once and found as it is, and nothing else happens.
func FuzzKey(f *testing.F) {
	for _, name := range []string{"plain", `'`, `''`, `\`, `\'`, `\\'`, `'); DROP TABLE watermill_inbox; --`, "E'", "$1", "?", "$$", "/*", "\x00", "\xff", "日本語", "\u2028", "a\nb"} {
		f.Add(name, "id")
		f.Add("consumer", name)
	}
	var databases []*testdb.Database
	var repositories []*inboxsql.Repository
	for _, db := range []*testdb.Database{testdb.PostgreSQL(f, "postgres"), testdb.PostgreSQL(f, "pgx"), testdb.SQLite(f)} {
		databases = append(databases, db)
		repositories = append(repositories, db.Repository(f, inboxsql.Options{}))
	}
	// An old server setting that changes how backslashes are read.
	old := testdb.PostgreSQL(f, "postgres")
	old.URL += "&standard_conforming_strings=off&backslash_quote=on"
	old.DB = old.Open(f)
	databases = append(databases, old)
	repositories = append(repositories, old.Repository(f, inboxsql.Options{}))

	f.Fuzz(func(t *testing.T, consumer, id string) {
		key := inbox.Key{Consumer: consumer, MessageID: id}
		if key.Validate() != nil {
			return // the middleware sends nothing then, see the kit
		}
		for i, db := range databases {
			if _, err := db.Exec(`DELETE FROM watermill_inbox`); err != nil {
				t.Fatal(err)
			}
			transaction, record, err := repositories[i].Claim(context.Background(), key)
			if err != nil || record != nil {
				t.Fatalf("%s: claim of %s: %v, %v", db.Driver, key, record, err)
			}
			if err := transaction.Store(context.Background(), []byte(consumer+id)); err != nil {
				t.Fatal(err)
			}
			if err := transaction.Commit(context.Background()); err != nil {
				t.Fatalf("%s: commit of %s: %v", db.Driver, key, err)
			}
			var gotConsumer, gotID string
			if err := db.QueryRow(`SELECT consumer, message_id FROM watermill_inbox`).Scan(&gotConsumer, &gotID); err != nil {
				t.Fatal(err)
			}
			if gotConsumer != consumer || gotID != id {
				t.Fatalf("%s: %s became %q/%q", db.Driver, key, gotConsumer, gotID)
			}
			transaction, record, err = repositories[i].Claim(context.Background(), key)
			if err != nil || record == nil || string(record.Produced) != consumer+id {
				t.Fatalf("%s: second claim of %s: %v, %v", db.Driver, key, record, err)
			}
			if err := transaction.Rollback(); err != nil {
				t.Fatal(err)
			}
			if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1 {
				t.Fatalf("%s: %d records", db.Driver, got)
			}
		}
	})
}

// A table name is refused, or names exactly one table.
func FuzzTable(f *testing.F) {
	for _, name := range []string{"inbox", "main.inbox", `a"b`, "a.b.c", "1", "a b", "a;b", "ä", "select", "main.select", "a\n", ".", "_", "A1_"} {
		f.Add(name)
	}
	db := testdb.SQLite(f)
	f.Fuzz(func(t *testing.T, name string) {
		repository, err := inboxsql.NewRepository(db.DB, inboxsql.Options{SchemaAdapter: db.Adapter, Table: name})
		if err != nil || strings.HasPrefix(strings.ToLower(name), "sqlite_") || strings.EqualFold(name, "effects") {
			return
		}
		schema, table, qualified := strings.Cut(name, ".")
		if !qualified {
			schema, table = "main", name
		}
		if table != "" && !strings.EqualFold(schema, "main") {
			return // another database file, which is not attached
		}
		if table == "" {
			table = "watermill_inbox"
		}
		if err := repository.InitializeSchema(context.Background()); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		if got := db.Count(t, `SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name <> 'effects'`); got != 1 {
			t.Fatalf("%q made %d tables", name, got)
		}
		db.MustExec(t, `DROP TABLE "`+table+`"`)
	})
}
