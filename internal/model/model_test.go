package model_test

import (
	"testing"

	"github.com/devmappa/watermill-inbox/internal/model"
)

func TestTheDesignKeepsItsPromise(t *testing.T) {
	t.Parallel()
	accidents := model.Accidents{Crashes: 2, Copies: 1, Failures: 2, Drops: 1, Skips: 1} // any combination of seven
	report := model.Explore(model.Design{}, model.Start(accidents))
	t.Logf("%d states, %d of them final; steps taken: %v", report.States, report.Final, report.Taken)
	for property, way := range report.Broken {
		t.Errorf("not so: %s\n%s", property, way)
	}
	if report.Stuck != "" {
		t.Errorf("nothing more can happen after\n%s", report.Stuck)
	}
	// An exploration that sees little finds nothing.
	if report.States < 250_000 || report.Final < 250 {
		t.Errorf("%d states, %d of them final are too few", report.States, report.Final)
	}
	for _, step := range []string{"deliver", "claim", "handle", "store", "commit", "publish", "ack", "mark", "lease", "expire",
		"crash", "disconnect", "drop", "skip", "duplicate", "rollBackOrphan"} {
		if report.Taken[step] == 0 {
			t.Errorf("the step %q was never taken", step)
		}
	}
}

// Each thing that the design does is needed: without it, something that was promised is broken. The log (-v)
// tells how.
func TestEveryChangeOfTheDesignIsConvicted(t *testing.T) {
	t.Parallel()
	none, crash, skip := model.Accidents{}, model.Accidents{Crashes: 1}, model.Accidents{Skips: 1}
	failure, twice := model.Accidents{Failures: 1}, model.Accidents{Copies: 1}
	dropped, skipped := model.Accidents{Crashes: 1, Drops: 1}, model.Accidents{Crashes: 1, Skips: 1}
	convicting := map[string]bool{}
	for _, c := range []struct {
		change    string
		design    model.Design
		accidents model.Accidents // as few as it takes
		broken    []model.Property
	}{
		{"the claim is committed before the effect", model.Design{ClaimFirst: true}, crash, []model.Property{model.EffectOnce, model.ClaimIffEffect}},
		{"the claim is committed after the effect", model.Design{ClaimLast: true}, crash, []model.Property{model.EffectOnce}},
		{"look up, then insert, without a unique key", model.Design{CheckThenInsert: true}, twice, []model.Property{model.EffectOnce, model.OneUUID}},
		{"a waiting copy is acknowledged as a duplicate", model.Design{AckWaitingCopy: true}, crash, []model.Property{model.AckedAfterCommit, model.EffectOnce}},
		{"no row inserted is a duplicate", model.Design{NoRowIsDuplicate: true}, failure, []model.Property{model.AckedAfterCommit, model.EffectOnce}},
		{"a handler that has ended its transaction is tried again", model.Design{EndedIsRetried: true}, failure, []model.Property{model.MessagePublished}},
		{"the commit forgets the claim", model.Design{ClaimIsForgotten: true}, none, []model.Property{model.ClaimIffEffect}},
		{"the message is acknowledged before the commit", model.Design{AckBeforeCommit: true}, crash, []model.Property{model.AckedAfterCommit, model.EffectOnce}},
		{"the produced message is not stored", model.Design{NothingStored: true}, crash, []model.Property{model.MessagePublished}},
		{"the produced message is marked as sent at the commit", model.Design{MarkAtCommit: true}, crash, []model.Property{model.MessagePublished}},
		{"the produced message is marked as sent at the ack", model.Design{MarkAtAck: true}, skip, []model.Property{model.MessagePublished}},
		{"a stored message gets a new UUID", model.Design{NewUUIDOnReplay: true}, crash, []model.Property{model.OneUUID}},
		{"there is no relay", model.Design{NoRelay: true}, dropped, []model.Property{model.MessagePublished}},
		{"the relay marks before it publishes", model.Design{RelayMarksBeforePublish: true}, skipped, []model.Property{model.MessagePublished}},
		{"a lease does not expire", model.Design{LeaseForEver: true}, skipped, []model.Property{model.MessagePublished}},
	} {
		report := model.Explore(c.design, model.Start(c.accidents))
		t.Logf("%s: %d states", c.change, report.States)
		for _, property := range c.broken {
			convicting[property.Name] = true
			way := report.Broken[property.Name]
			if way == "" {
				t.Errorf("%s, and yet %s", c.change, property.Name)
				continue
			}
			t.Logf("%s. Not so any more: %s.\n%s", c.change, property.Name, way)
		}
	}
	for _, property := range model.Properties {
		if !convicting[property.Name] {
			t.Errorf("no change breaks this property: %s", property.Name)
		}
	}
}
