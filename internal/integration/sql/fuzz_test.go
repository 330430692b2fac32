package sql_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// FuzzKey: whatever the names hold, a valid key is claimed once and found as it is, and nothing else happens.
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
			for _, table := range []string{"watermill_inbox", "watermill_inbox_unsent"} {
				if _, err := db.Exec(`DELETE FROM ` + table); err != nil {
					t.Fatal(err)
				}
			}
			transaction, record, err := repositories[i].Claim(context.Background(), inbox.ClaimParams{Key: key})
			if err != nil || record != nil {
				t.Fatalf("%s: claim of %s: %v, %v", db.Driver, key, record, err)
			}
			if _, err := transaction.Store(context.Background(), inbox.StoreParams{Topic: "events", Produced: []byte(consumer + id)}); err != nil {
				t.Fatal(err)
			}
			if err := transaction.Commit(context.Background()); err != nil {
				t.Fatalf("%s: commit of %s: %v", db.Driver, key, err)
			}
			for _, table := range []string{"watermill_inbox", "watermill_inbox_unsent"} {
				var gotConsumer, gotID string
				if err := db.QueryRow(`SELECT consumer, message_id FROM `+table).Scan(&gotConsumer, &gotID); err != nil {
					t.Fatal(err)
				}
				if gotConsumer != consumer || gotID != id {
					t.Fatalf("%s: %s became %q/%q in %s", db.Driver, key, gotConsumer, gotID, table)
				}
			}
			transaction, record, err = repositories[i].Claim(context.Background(), inbox.ClaimParams{Key: key})
			if err != nil || transaction != nil || record == nil || record.Topic != "events" || string(record.Produced) != consumer+id {
				t.Fatalf("%s: second claim of %s: %v, %v", db.Driver, key, record, err)
			}
			if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1 {
				t.Fatalf("%s: %d records", db.Driver, got)
			}
		}
	})
}

// FuzzTable: a table name is refused, or names exactly one table and that of its unsent messages, in which everything works. Names that the
// database has taken for itself are refused when the table is made.
func FuzzTable(f *testing.F) {
	for _, name := range []string{"", "inbox", "Inbox", `a"b`, "1", "a b", "a;b", "ä", "select", "a\n", "_", "A1_", "_effects", "record", "expired", "need",
		"key", "attribute", "text", "pg_class", "PG_class", "sqlite_x", "SQLITE_MASTER", "consumer", strings.Repeat("x", 46)} {
		f.Add(name, false)
		f.Add(name, true)
	}
	postgres, sqlite := testdb.PostgreSQL(f, "postgres"), testdb.SQLite(f)
	schema := texts(f, postgres, `SELECT current_schema()`)[0]
	catalog := map[string]bool{} // is searched first
	for _, name := range texts(f, postgres, `SELECT relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace`) {
		catalog[name] = true
	}

	f.Fuzz(func(t *testing.T, name string, qualified bool) {
		if strings.Contains(name, ".") || strings.EqualFold(name, "effects") {
			return // FuzzParseTable has the schemas; the test has a table of its own
		}
		if strings.HasPrefix(strings.ToLower(name), "pragma_") {
			return // hides a function that Check calls in SQLite, which fails then
		}
		for _, c := range []struct {
			db              *testdb.Database
			schema          string
			taken           bool
			tables, indexes string
		}{
			{postgres, schema, !qualified && catalog[name],
				`SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND tablename <> 'effects'`,
				`SELECT count(*) FROM pg_indexes WHERE schemaname = current_schema() AND tablename = $1 AND indexname = $2`},
			{sqlite, "main", strings.HasPrefix(strings.ToLower(name), "sqlite_"),
				`SELECT name FROM sqlite_schema WHERE type = 'table' AND name <> 'effects'`,
				`SELECT count(*) FROM sqlite_schema WHERE type = 'index' AND tbl_name = $1 AND name = $2`},
		} {
			table := name
			if qualified {
				table = c.schema + "." + name
			}
			repository, err := inboxsql.NewRepository(c.db.DB, inboxsql.Options{SchemaAdapter: c.db.Adapter, Table: table})
			if err != nil {
				continue
			}
			want := name
			if table == "" {
				want = "watermill_inbox"
			}
			if c.taken {
				if repository.InitializeSchema(context.Background()) == nil {
					t.Fatalf("%s: %q is the database's own and was accepted", c.db.Driver, table)
				}
				if made := texts(t, c.db, c.tables); len(made) != 0 {
					t.Fatalf("%s: %q was refused and made %q", c.db.Driver, table, made)
				}
				continue
			}
			full := `"` + c.schema + `"."` + want + `"`
			defer c.db.MustExec(t, `DROP TABLE "`+c.schema+`"."`+want+`_unsent"`)
			defer c.db.MustExec(t, `DROP TABLE `+full)
			for range 2 {
				if err := repository.InitializeSchema(context.Background()); err != nil {
					t.Fatalf("%s: %q: %v", c.db.Driver, table, err)
				}
			}
			if made := texts(t, c.db, c.tables); len(made) != 2 || !slices.Contains(made, want) || !slices.Contains(made, want+"_unsent") {
				t.Fatalf("%s: %q made %q", c.db.Driver, table, made)
			}
			if made := c.db.Count(t, c.indexes, want, want+"_consumer_processed_at_idx"); made != 1 {
				t.Fatalf("%s: %q made %d indexes", c.db.Driver, table, made)
			}
			use(t, repository)
			if left := c.db.Count(t, `SELECT (SELECT count(*) FROM `+full+`) + (SELECT count(*) FROM "`+c.schema+`"."`+want+`_unsent")`); left != 0 {
				t.Fatalf("%s: %q: %d records are left", c.db.Driver, table, left)
			}
		}
	})
}

// texts returns what the query selects.
func texts(t testing.TB, db *testdb.Database, query string) []string {
	t.Helper()
	rows, err := db.Query(query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var texts []string
	for rows.Next() {
		var text string
		if err := rows.Scan(&text); err != nil {
			t.Fatal(err)
		}
		texts = append(texts, text)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return texts
}

// use runs every statement of a repository: it processes a message, finds it processed, marks and deletes it.
func use(t *testing.T, repository *inboxsql.Repository) {
	t.Helper()
	ctx, key := context.Background(), inbox.Key{Consumer: "c", MessageID: "1"}
	for processed := range 2 {
		transaction, record, err := repository.Claim(ctx, inbox.ClaimParams{Key: key})
		if err != nil || (record != nil) != (processed == 1) {
			t.Fatalf("claim: %v, %v", record, err)
		}
		if record == nil {
			if _, err = transaction.Store(ctx, inbox.StoreParams{Topic: "events", Produced: []byte("stored")}); err == nil {
				err = transaction.Commit(ctx)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if unsent, err := repository.CountRecords(ctx, inbox.Selection{Unsent: true}); err != nil || unsent != 1 {
		t.Fatalf("%d unsent, %v", unsent, err)
	}
	unsent, err := repository.FindRecords(ctx, inbox.Selection{Unsent: true}, inbox.Record{}, 2)
	if err != nil || len(unsent) != 1 || unsent[0].Key != key {
		t.Fatalf("unsent are %+v, %v", unsent, err)
	}
	leased, err := repository.LeaseUnsent(ctx, inbox.Selection{Unsent: true}, inbox.Record{}, 2, time.Hour)
	if err != nil || len(leased) != 1 || leased[0].Key != key {
		t.Fatalf("leased are %+v, %v", leased, err)
	}
	if locked, err := repository.MarkSent(ctx, unsent); err != nil || len(locked) != 0 {
		t.Fatalf("%v are locked, %v", locked, err)
	}
	if _, err := repository.Statistics(ctx, inbox.AllConsumers()); err != nil {
		t.Fatal(err)
	}
	if deleted, _, err := repository.DeleteProcessed(ctx, inbox.DeleteProcessedParams{Consumer: key.Consumer, Before: time.Now().Add(time.Hour), Limit: 2}); err != nil || deleted != 1 {
		t.Fatalf("%d deleted, %v", deleted, err)
	}
}
