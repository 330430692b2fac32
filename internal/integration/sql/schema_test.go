package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

var readOnly = &sql.TxOptions{ReadOnly: true}

const postgreSQLColumns = `consumer text NOT NULL, message_id text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(), produced bytea, dispatched_at timestamptz`

// Tables that would lose messages or let them run twice are refused before the first handler runs.
func TestCheckRefuses(t *testing.T) {
	t.Parallel()
	key := `, PRIMARY KEY (consumer, message_id)`
	for name, c := range map[string]struct{ driver, ddl, want string }{
		"no table": {"postgres", `SELECT 1`, "the table does not exist"},
		"no unique key": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + `)`, "no primary key or unique index"},
		"partial unique index": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX ON watermill_inbox (consumer, message_id) WHERE consumer <> ''`, "no primary key or unique index"},
		"invalid unique index": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX i ON watermill_inbox (consumer, message_id);
			 UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'i'::regclass`, "no primary key or unique index"},
		"key widened by a partition column": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id, processed_at)) PARTITION BY RANGE (processed_at);
			 CREATE TABLE p PARTITION OF watermill_inbox DEFAULT`, "no primary key or unique index"},
		"key without the consumer": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (message_id))`, "no primary key or unique index"},
		"deferrable key": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + ` DEFERRABLE)`, "no primary key or unique index"},
		"key on an expression": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX ON watermill_inbox (consumer, lower(message_id))`, "no primary key or unique index"},
		"nondeterministic collation": {"postgres",
			`CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
			 CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id text COLLATE folding", 1) + key + `)`, "nondeterministic collation"},
		"uuid column, in which spellings meet": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id uuid", 1) + key + `)`, "column message_id has type uuid"},
		"padded column": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id char(255)", 1) + key + `)`, "column message_id has type character(255)"},
		"short column": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id varchar(36)", 1) + key + `)`, "column message_id has type character varying(36)"},
		"missing columns": {"postgres",
			`CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at timestamptz DEFAULT now()` + key + `)`, "column produced is missing: apply schema file 001_inbox.sql; column dispatched_at is missing"},
		"unlogged table": {"postgres",
			`CREATE UNLOGGED TABLE watermill_inbox (` + postgreSQLColumns + key + `)`, "unlogged"},
		"view": {"postgres",
			`CREATE TABLE t (` + postgreSQLColumns + key + `); CREATE VIEW watermill_inbox AS SELECT * FROM t`, "it is not a table"},
		"processed_at without a default": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "DEFAULT now()", "", 1) + key + `)`, "column processed_at must be NOT NULL and have a default"},
		"processed_at without a time zone": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "timestamptz NOT NULL", "timestamp NOT NULL", 1) + key + `)`, "column processed_at has type timestamp without time zone"},
		"produced as text": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "bytea", "text", 1) + key + `)`, "column produced has type text, it must be bytea"},
		"generated column": {"postgres",
			`CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "bytea", "bytea GENERATED ALWAYS AS ('') STORED", 1) + key + `)`, "column produced is generated"},
		"a unique index that is too narrow": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + `); CREATE UNIQUE INDEX narrow ON watermill_inbox (message_id)`, "narrow is unique on less than the key"},
		"unlogged partition": {"postgres",
			`CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + `) PARTITION BY HASH (message_id);
			 CREATE UNLOGGED TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 1, REMAINDER 0)`, "unlogged"},
		"SQLite: nothing can be rolled back":     {"sqlite journal off", `CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at int DEFAULT 0, produced blob, dispatched_at int, PRIMARY KEY (consumer, message_id))`, "journal_mode is off"},
		"SQLite: processed_at without a default": {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at int, produced blob, dispatched_at int, PRIMARY KEY (consumer, message_id))`, "column processed_at has no default"},
		"SQLite: a unique column that replaces":  {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text UNIQUE ON CONFLICT REPLACE, processed_at int DEFAULT 0, produced blob, dispatched_at int, PRIMARY KEY (consumer, message_id))`, "is unique on less than the key"},
		"SQLite: no table":                       {"sqlite", `SELECT 1`, "the table does not exist"},
		"SQLite: no unique key":                  {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at int DEFAULT 0, produced blob, dispatched_at int)`, "no primary key or unique index"},
		"SQLite: partial unique index": {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at int, produced blob, dispatched_at int);
			 CREATE UNIQUE INDEX i ON watermill_inbox (consumer, message_id) WHERE consumer <> ''`, "no primary key or unique index"},
		"SQLite: wider key":              {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at int, produced blob, dispatched_at int, PRIMARY KEY (consumer, message_id, processed_at))`, "no primary key or unique index"},
		"SQLite, collation without case": {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text COLLATE NOCASE, processed_at int, produced blob, dispatched_at int, PRIMARY KEY (consumer, message_id))`, "no primary key or unique index"},
		"SQLite: numbers meet":           {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id numeric, processed_at int, produced blob, dispatched_at int, PRIMARY KEY (consumer, message_id))`, "column message_id has type NUMERIC"},
		"SQLite: column missing":         {"sqlite", `CREATE TABLE watermill_inbox (consumer text, message_id text, processed_at int, PRIMARY KEY (consumer, message_id))`, "column produced is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var db *testdb.Database
			switch c.driver {
			case "sqlite":
				db = testdb.SQLite(t)
			case "sqlite journal off":
				db = testdb.SQLiteWith(t, "_pragma=journal_mode(OFF)")
			default:
				db = testdb.PostgreSQL(t, c.driver)
			}
			db.MustExec(t, c.ddl)
			repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
			m, err := inbox.NewMiddleware(repository, inbox.Options{Consumer: func(string) string { return "c" }})
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // it stays refused
				_, err = m.Middleware(func(*message.Message) ([]*message.Message, error) {
					t.Error("the handler ran")
					return nil, nil
				})(newMessage("1"))
				var check *inbox.CheckError
				if !errors.As(err, &check) || !strings.Contains(strings.Join(check.Problems, "; "), c.want) {
					t.Fatalf("the error is %v, want a *CheckError that says %q", err, c.want)
				}
				if inbox.ShouldPoison(err) {
					t.Fatal("a wrong table would poison messages")
				}
			}
		})
	}
}

// A temporary table is a connection's own, so another connection would claim again what it has claimed.
func TestCheckRefusesATemporaryTable(t *testing.T) {
	t.Parallel()
	for driver, c := range map[string]struct {
		db    *testdb.Database
		table string
	}{
		"SQLite":                   {testdb.SQLite(t), "temp.inbox"},
		"SQLite, in other letters": {testdb.SQLite(t), "TEMP.inbox"},
		"PostgreSQL":               {testdb.PostgreSQL(t, "postgres"), "pg_temp.inbox"},
	} {
		repository := c.db.RepositoryWithoutSchema(t, inboxsql.Options{Table: c.table})
		var check *inbox.CheckError
		if err := repository.InitializeSchema(context.Background()); !errors.As(err, &check) || !strings.Contains(err.Error(), "temporary") {
			t.Errorf("%s: the error is %v, want a *CheckError about a temporary table", driver, err)
		}
	}
}

func TestCheckAccepts(t *testing.T) {
	t.Parallel()
	for name, ddl := range map[string]string{
		"unique index instead of a primary key": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX ON watermill_inbox (message_id, consumer)`,
		"varchar(255)":                          `CREATE TABLE watermill_inbox (` + strings.ReplaceAll(postgreSQLColumns, "text", "varchar(255)") + `, PRIMARY KEY (consumer, message_id))`,
		"hash partitions on the key": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (message_id);
			CREATE TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
			CREATE TABLE p1 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)`,
		"a column of the next version, and one's own": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, added_by_the_next_version text, note text DEFAULT 'x', PRIMARY KEY (consumer, message_id))`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			db.MustExec(t, ddl)
			a := newApp(t, db, db.RepositoryWithoutSchema(t, inboxsql.Options{}), inbox.Options{})
			a.router.AddMiddleware(a.inbox.Middleware)
			a.handle("book", "payments", func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
			a.run()
			for _, id := range []string{"1", "2", "1", "3", "2"} {
				a.publish("payments", newMessage(id))
			}
			a.wantEffects("1", "2", "3")
		})
	}
}

// The check repeats until it succeeds, so a service may start before its table.
func TestCheckIsRepeatedUntilItSucceeds(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
	key := inbox.Key{Consumer: "c", MessageID: "1"}
	if _, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: key}); err == nil {
		t.Fatal("claimed without a table")
	}
	if err := db.Repository(t, inboxsql.Options{}).Check(context.Background()); err != nil {
		t.Fatal(err)
	}
	transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: key})
	if err != nil {
		t.Fatal(err)
	}
	if err := transaction.Rollback(); err != nil {
		t.Fatal(err)
	}
}

func TestCheckRefusesAReadOnlyServer(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	db.URL += "&default_transaction_read_only=on"
	db.DB = db.Open(t)
	err := db.RepositoryWithoutSchema(t, inboxsql.Options{}).Check(context.Background())
	if err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Fatalf("the error is %v", err)
	}
}

func TestCheckRefusesAnotherEncoding(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "pgx")
	db.Repository(t, inboxsql.Options{})
	db.URL += "&client_encoding=LATIN1"
	db.DB = db.Open(t)
	err := db.RepositoryWithoutSchema(t, inboxsql.Options{}).Check(context.Background())
	if err == nil || !strings.Contains(err.Error(), "client_encoding is LATIN1") {
		t.Fatalf("the error is %v", err)
	}
}

func TestInitializeSchemaInTwentyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(testing.TB) *testdb.Database{
		"lib-pq": func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
		"pgx":    func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "pgx") },
		"SQLite": testdb.SQLite,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t)
			var group sync.WaitGroup
			start := make(chan struct{})
			for range 20 {
				pool := db.Open(t)
				pool.SetMaxOpenConns(1)
				repository, err := inboxsql.NewRepository(pool, inboxsql.Options{SchemaAdapter: db.Adapter})
				if err != nil {
					t.Fatal(err)
				}
				if err := pool.Ping(); err != nil {
					t.Fatal(err)
				}
				group.Add(1)
				go func() {
					defer group.Done()
					<-start
					if err := repository.InitializeSchema(context.Background()); err != nil {
						t.Error(err)
					}
				}()
			}
			close(start)
			group.Wait()
		})
	}
}

// The grants of the schema file are enough, and a role that must not create may call InitializeSchema.
func TestLeastPrivilege(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	role := "role_" + testdb.RandomName()
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	cleaner := role + "_cleaner"
	for _, name := range []string{role, cleaner} {
		db.MustExec(t, `CREATE ROLE `+name+` LOGIN`)
		t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+name+`; DROP ROLE `+name) })
		db.MustExec(t, `GRANT USAGE ON SCHEMA `+schema+` TO `+name)
	}
	db.MustExec(t, `GRANT INSERT, SELECT ON effects TO `+role)

	asRole := *db
	asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
	asRole.DB = asRole.Open(t)
	repository := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
	if err := repository.Check(context.Background()); err == nil || !strings.Contains(err.Error(), "lacks the privilege INSERT") {
		t.Fatalf("without grants the check says %v", err)
	}
	file, err := fs.ReadFile(inboxsql.Schema, "schema/postgresql/001_inbox.sql")
	if err != nil {
		t.Fatal(err)
	}
	grants := 0
	for _, line := range strings.Split(string(file), "\n") {
		if _, grant, found := strings.Cut(line, "--   GRANT "); found {
			grant = strings.NewReplacer("your_consumer_role", role, "your_cleaner_role", cleaner).Replace(grant)
			db.MustExec(t, "GRANT "+grant)
			grants++
		}
	}
	if grants != 2 {
		t.Fatalf("%d grants in the schema file", grants)
	}
	if err := repository.InitializeSchema(context.Background()); err != nil {
		t.Fatal(err)
	}
	a := newApp(t, &asRole, repository, inbox.Options{})
	a.router.AddMiddleware(a.inbox.Middleware)
	events := &recorder{fails: 1}
	a.router.AddHandler("book", "payments", a.broker, "events", events, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{newMessage("event")}, asRole.Write(msg.Context(), msg.UUID)
	})
	a.run()
	a.publish("payments", newMessage("1"))
	a.wantEffects("1")
	if got := len(events.all()); got != 1 {
		t.Fatalf("%d events, want the replay", got)
	}
	a.stop()
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox WHERE dispatched_at IS NOT NULL`); got != 1 {
		t.Fatalf("%d records are marked", got)
	}
	asCleaner := *db
	asCleaner.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+cleaner+"@", 1)
	asCleaner.DB = asCleaner.Open(t)
	pass, err := newCleaner(t, asCleaner.RepositoryWithoutSchema(t, inboxsql.Options{})).Pass(context.Background())
	if err != nil || pass.Deleted != 1 {
		t.Fatalf("%+v, %v", pass, err)
	}
}

func newCleaner(t *testing.T, repository inbox.Records) *inbox.Cleaner {
	t.Helper()
	c, err := inbox.NewCleaner(repository, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Nanosecond}, BatchSize: 100, BatchPause: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Several cleaners at once on a partitioned table: one works at a time, the limit holds, and what is
// young stays although its place in its partition is that of an old one in another.
func TestCleanersOnHashPartitions(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.MustExec(t, `CREATE TABLE watermill_inbox (`+postgreSQLColumns+`, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (message_id);
		CREATE TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
		CREATE TABLE p1 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1);
		INSERT INTO watermill_inbox SELECT 'c', i::text, now() - interval '1 hour' * (i % 2) FROM generate_series(1, 2000) i`)
	repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
	halfHourAgo := time.Now().Add(-30 * time.Minute)
	deleted, _, err := repository.DeleteProcessed(context.Background(), "c", time.Time{}, halfHourAgo, 10)
	if err != nil || deleted != 10 {
		t.Fatalf("deleted %d, %v, want 10", deleted, err)
	}
	var group sync.WaitGroup
	var total atomic.Int32
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				deleted, _, err := repository.DeleteProcessed(context.Background(), "c", time.Time{}, halfHourAgo, 50)
				if errors.Is(err, inbox.ErrCleaning) {
					continue
				}
				if err != nil {
					t.Error(err)
				}
				if deleted == 0 {
					return
				}
				total.Add(int32(deleted))
			}
		}()
	}
	group.Wait()
	if got := total.Load(); got != 990 {
		t.Errorf("%d deleted, want 990", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1000 {
		t.Errorf("%d records are left, want the 1000 young ones", got)
	}
}

// A handler may change the search path, even of its pooled session: the inbox stays where it was found.
func TestSearchPathOfTheHandler(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(1)
		var home string
		if err := db.QueryRow(`SELECT current_schema()`).Scan(&home); err != nil {
			t.Fatal(err)
		}
		tenant := "tenant_" + testdb.RandomName()
		db.MustExec(t, `CREATE SCHEMA `+tenant)
		t.Cleanup(func() {
			db.MustExec(t, `SET search_path = `+home)
			db.MustExec(t, `DROP SCHEMA `+tenant+` CASCADE`)
		})
		db.MustExec(t, `CREATE TABLE `+tenant+`.watermill_inbox (`+postgreSQLColumns+`, PRIMARY KEY (consumer, message_id))`)
		for _, set := range []string{"SET LOCAL", "SET"} {
			runs := 0
			a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
			a.router.AddMiddleware(a.inbox.Middleware)
			a.router.AddHandler("book", "payments", a.broker, "events", &discard{}, func(msg *message.Message) ([]*message.Message, error) {
				runs++
				tx, _ := inboxsql.TxFromContext(msg.Context())
				_, err := tx.ExecContext(msg.Context(), set+` search_path = `+tenant)
				return []*message.Message{newMessage("event")}, err
			})
			a.run()
			a.publish("payments", newMessage(set))
			a.publish("payments", newMessage(set))
			a.stop()
			if runs != 1 {
				t.Errorf("%s: the handler ran %d times", set, runs)
			}
			if got := db.Count(t, `SELECT count(*) FROM `+tenant+`.watermill_inbox`); got != 0 {
				t.Errorf("%s: %d claims in the tenant's table", set, got)
			}
			db.MustExec(t, `SET search_path = `+home)
		}
	})
}

// The schema files work under another name and in another schema.
func TestTableOption(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	schema := "other_" + testdb.RandomName()
	db.MustExec(t, `CREATE SCHEMA `+schema)
	t.Cleanup(func() { db.MustExec(t, `DROP SCHEMA `+schema+` CASCADE`) })
	for _, table := range []string{schema + ".watermill_inbox", schema + ".Inbox2", "inbox3"} {
		repository := db.Repository(t, inboxsql.Options{Table: table})
		transaction, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
		if err != nil || record != nil {
			t.Fatalf("%s: %v, %v", table, record, err)
		}
		if err := transaction.Commit(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if got := db.Count(t, `SELECT count(*) FROM pg_indexes WHERE schemaname = $1`, schema); got != 4 {
		t.Errorf("%d indexes in the schema, want a primary key and one on processed_at for each of two tables", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM inbox3`); got != 1 {
		t.Errorf("%d records", got)
	}
}

// "0 rows affected" is not yet a duplicate: a trigger may have swallowed the row. Only a record that is seen makes one.
func TestNoRowIsADuplicateOnlyIfTheRecordIsSeen(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		open func(testing.TB) *testdb.Database
		ddl  string
	}{
		"a trigger swallows the row": {
			func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
			`CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
			 CREATE TRIGGER swallow BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION swallow()`,
		},
		"a trigger routes the row to a child table": {
			func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
			`CREATE TABLE child () INHERITS (watermill_inbox);
			 CREATE FUNCTION route() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO child VALUES (NEW.*); RETURN NULL; END';
			 CREATE TRIGGER route BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION route()`,
		},
		"a rule swallows the row": {
			func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "pgx") },
			`ALTER TABLE watermill_inbox ENABLE ROW LEVEL SECURITY;
			 CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF NEW.message_id = ''1'' THEN RETURN NULL; END IF; RETURN NEW; END';
			 CREATE TRIGGER swallow BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION swallow()`,
		},
		"SQLite: a trigger swallows the row": {
			testdb.SQLite,
			`CREATE TRIGGER swallow BEFORE INSERT ON watermill_inbox BEGIN SELECT RAISE(IGNORE); END`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := c.open(t)
			repository := db.Repository(t, inboxsql.Options{})
			db.MustExec(t, c.ddl)
			_, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
			if !errors.Is(err, inbox.ErrNoRecord) || record != nil {
				t.Fatalf("record %v, error %v, want ErrNoRecord", record, err)
			}
			if inbox.ShouldPoison(&inbox.Error{Step: "claim", Err: err}) {
				t.Fatal("it would be poisoned")
			}
		})
	}
}

func TestARealErrorIsNotADuplicate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		open func(testing.TB) *testdb.Database
		ddl  string
	}{
		"PostgreSQL": {func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") }, `ALTER TABLE watermill_inbox ADD COLUMN required text NOT NULL`},
		"SQLite": {testdb.SQLite, `DROP TABLE watermill_inbox; CREATE TABLE watermill_inbox (consumer text NOT NULL, message_id text NOT NULL,
			processed_at integer NOT NULL DEFAULT 0, produced blob, dispatched_at integer, required text NOT NULL, PRIMARY KEY (consumer, message_id))`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := c.open(t)
			repository := db.Repository(t, inboxsql.Options{})
			db.MustExec(t, c.ddl)
			if _, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}}); err == nil {
				t.Fatalf("no error; record %v", record)
			}
			if inUse := db.Stats().InUse; inUse != 0 {
				t.Fatalf("%d connections in use", inUse)
			}
		})
	}
}

func TestNewRepositoryRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	for name, options := range map[string]inboxsql.Options{
		"no adapter":       {},
		"read-only":        {SchemaAdapter: db.Adapter, TxOptions: readOnly},
		"quote in table":   {SchemaAdapter: db.Adapter, Table: `a"b`},
		"two dots":         {SchemaAdapter: db.Adapter, Table: `a.b.c`},
		"empty schema":     {SchemaAdapter: db.Adapter, Table: `.b`},
		"too long":         {SchemaAdapter: db.Adapter, Table: strings.Repeat("a", 60)},
		"leading digit":    {SchemaAdapter: db.Adapter, Table: `1a`},
		"NUL":              {SchemaAdapter: db.Adapter, Table: "a\x00"},
		"statement":        {SchemaAdapter: db.Adapter, Table: `a; DROP TABLE b`},
		"trailing newline": {SchemaAdapter: db.Adapter, Table: "a\n"},
	} {
		if _, err := inboxsql.NewRepository(db.DB, options); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := inboxsql.NewRepository(nil, inboxsql.Options{SchemaAdapter: db.Adapter}); err == nil {
		t.Error("nil pool: no error")
	}
}

// obedient embeds an adapter of ours and changes a part of it.
type obedient struct {
	inboxsql.DefaultPostgreSQLSchema
}

// A claim of another shape is another guarantee, so only the adapters of the package are taken, as they are.
func TestNewRepositoryRefusesOtherAdapters(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	for _, adapter := range []inboxsql.SchemaAdapter{obedient{}, &obedient{}, &inboxsql.DefaultPostgreSQLSchema{}, (*inboxsql.DefaultSQLiteSchema)(nil)} {
		if _, err := inboxsql.NewRepository(db.DB, inboxsql.Options{SchemaAdapter: adapter}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%T", adapter)) {
			t.Errorf("%T: the error is %v", adapter, err)
		}
	}
}

// While a fault hides the table or makes Check fail, InitializeSchema makes no second one in another schema of the
// search path: it would know of no message that was processed.
func TestInitializeSchemaMakesNoSecondTable(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct{ begin, end string }{
		"the table is unlogged":           {`ALTER TABLE öff_%[1]s.watermill_inbox SET UNLOGGED`, `ALTER TABLE öff_%[1]s.watermill_inbox SET LOGGED`},
		"a privilege is missing":          {`REVOKE UPDATE ON öff_%[1]s.watermill_inbox FROM role_%[1]s`, `GRANT UPDATE ON öff_%[1]s.watermill_inbox TO role_%[1]s`},
		"the schema's USAGE is missing":   {`REVOKE USAGE ON SCHEMA öff_%[1]s FROM role_%[1]s`, `GRANT USAGE ON SCHEMA öff_%[1]s TO role_%[1]s`},
		"the server is read-only for us":  {`ALTER ROLE role_%[1]s SET default_transaction_read_only = on`, `ALTER ROLE role_%[1]s RESET default_transaction_read_only`},
		"nothing, and the table is empty": {`SELECT 1`, `SELECT 1`},
	} {
		for _, way := range testdb.Ways {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				db, id := testdb.PostgreSQL(t, "postgres"), testdb.RandomName()
				exec := func(statement string) { db.MustExec(t, strings.ReplaceAll(statement, "%[1]s", id)) }
				exec(`CREATE ROLE role_%[1]s LOGIN; CREATE SCHEMA öff_%[1]s; CREATE SCHEMA svc_%[1]s AUTHORIZATION role_%[1]s;
					GRANT USAGE ON SCHEMA öff_%[1]s TO role_%[1]s`)
				t.Cleanup(func() {
					exec(`DROP SCHEMA öff_%[1]s, svc_%[1]s CASCADE; DROP OWNED BY role_%[1]s; DROP ROLE role_%[1]s`)
				})
				owner := db.Way(t, "postgres", strings.Replace(db.URL, "search_path=", "search_path="+url.QueryEscape("öff_"+id)+"%2C", 1), 1)
				if err := owner.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				exec(`GRANT INSERT, SELECT, UPDATE ON öff_%[1]s.watermill_inbox TO role_%[1]s`)
				address := strings.Replace(strings.Replace(db.URL, "search_path=", "search_path=svc_"+id+"%2C"+url.QueryEscape("öff_"+id)+"%2C", 1), "postgres://postgres@", "postgres://role_"+id+"@", 1)
				run := func() (runs int) {
					service := db.Way(t, way, address, 2)
					initErr := service.InitializeSchema(context.Background())
					handler := wrap(t, service, inbox.Options{}, func(*message.Message) error { runs++; return nil })
					if _, err := handler(newMessage("payment")); (err != nil) != (initErr != nil) {
						t.Errorf("InitializeSchema: %v, the message: %v", initErr, err)
					}
					return runs
				}
				if runs := run(); runs != 1 {
					t.Fatalf("the handler ran %d times", runs)
				}
				exec(fault.begin)
				if runs := run(); runs != 0 {
					t.Errorf("the handler ran %d times during the fault", runs)
				}
				exec(fault.end)
				if runs := run(); runs != 0 {
					t.Errorf("the copy ran %d times after the repair", runs)
				}
				if got := db.Count(t, `SELECT count(*) FROM pg_class WHERE relname = 'watermill_inbox' AND relnamespace = $1::regnamespace`, "svc_"+id); got != 0 {
					t.Error("there is a second table")
				}
			})
		}
	}
}

// What a handler leaves in the session changes neither what a later message's id means nor whether it can be claimed.
func TestSessionSettingsDoNotChangeTheKey(t *testing.T) {
	t.Parallel()
	for _, way := range testdb.Ways {
		for _, setting := range []string{`client_encoding = LATIN1`, `standard_conforming_strings = off`, `backslash_quote = off`} {
			t.Run(way+", "+setting, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, "postgres")
				service, other := db.Way(t, way, db.URL, 1), db.Way(t, "postgres", db.URL, 1)
				if err := service.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				first := wrap(t, service, inbox.Options{}, func(msg *message.Message) error {
					return service.Exec(msg.Context(), `SET SESSION `+setting)
				})
				if _, err := first(newMessage("first")); err != nil {
					t.Fatal(err)
				}
				ids := []string{`plain`, `é`, `€\u0041`, `it's`, `a\'b`, "line\nend\x01", `🙂`, `''`}
				for i, on := range []inbox.Repository{service, other, service} {
					runs := 0
					handler := wrap(t, on, inbox.Options{}, func(*message.Message) error { runs++; return nil })
					for _, id := range ids {
						if _, err := handler(newMessage(id)); err != nil {
							t.Fatalf("%q: %v", id, err)
						}
					}
					if i == 0 && runs != len(ids) || i > 0 && runs != 0 {
						t.Fatalf("%d runs in round %d", runs, i)
					}
				}
				for _, id := range ids {
					if got := db.Count(t, `SELECT count(*) FROM watermill_inbox WHERE message_id = $1`, id); got != 1 {
						t.Errorf("%q is stored %d times", id, got)
					}
				}
				if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != len(ids)+1 {
					t.Errorf("%d records, want %d", got, len(ids)+1)
				}
			})
		}
	}
}
